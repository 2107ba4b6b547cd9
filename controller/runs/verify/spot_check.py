"""`areal-like verify --spot N`: recomputes the log-probs of random stored samples from checkpoints.

A sample can be checked if its tokens are stored, all of them were sampled by one version, and a checkpoint of exactly
this version (for version 0, the starting model) is on disk. The log-probs are computed by a plain forward pass on the
CPU (trainer/spot_logprobs.py).
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from areal_like.encryption.files import read_text
from areal_like.errors import UserError
from areal_like.plain_folder import plain_folder
from areal_like.spot_files import SpotSpec
from areal_like.trajectory import Trajectory
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.launch.short_process import run_module
from controller.ledger.ledger import SEGMENT_FOLDER
from controller.ledger.read_only import check_schema, open_ledger
from controller.ledger.segment_store import Location, SegmentStore, unpack_sample
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.damaged import DAMAGED
from controller.wiring.checkpoints import checkpoints_on_disk, holds_adapter
from controller.wiring.process_specs import SPOT_LOGPROBS, num_cores

LIMIT_S = 3600.0
"""Time limit of the forward passes with one checkpoint."""
EXACT_NATS, HALF_NATS = 1e-3, 0.25
"""Largest difference of a token's log-prob: of an engine in float32 on a CPU, and of any other."""

Compute = Callable[[SpotSpec], list[list[float]]]


class Spots(NamedTuple):
    """Result: one finding for each sample that differs, and lines for the user."""

    findings: list[str]
    lines: list[str]


class _Sample(NamedTuple):
    name: str
    version: int
    trajectories: tuple[Trajectory, ...]


def spot_check(folder: RunFolder, num_spots: int, seed: int, compute: Compute | None = None) -> Spots:
    """Check up to `num_spots` samples, chosen by `seed`. compute: replaces the process, for tests.

    Raises UserError (no ledger, unreadable configuration), OperationError (the process failed).
    """
    config = load_config(str(folder.config)).config
    if config.emulation is not None:
        return Spots([], ["spot checks: there are none, because the devices of this run were emulated"])
    checkpoints = _starting_model(folder) | dict(checkpoints_on_disk(folder.root))
    usable = {version for version, path in checkpoints.items() if not holds_adapter(path)}
    chosen, reasons = _choose(folder, usable, num_spots, random.Random(seed))
    if len(usable) < len(checkpoints):
        reasons["their checkpoint contains an adapter"] = reasons.pop("their version has no checkpoint", 0)
    findings: list[str] = []
    tolerance, num_tokens, largest = _tolerance(config), 0, 0.0
    for version in sorted({sample.version for sample in chosen}):
        samples = [sample for sample in chosen if sample.version == version]
        sequences = [one for sample in samples for one in sample.trajectories]
        with plain_folder(checkpoints[version]) as weights:
            recomputed = iter((compute or _compute)(_spec(config, weights, sequences)))
        for sample in samples:
            for trajectory in sample.trajectories:
                recorded = trajectory.logprobs_T[trajectory.loss_mask_T]
                gap = np.abs(recorded - np.asarray(next(recomputed), np.float64))
                num_tokens, largest = num_tokens + len(gap), max(largest, float(gap.max(initial=0.0)))
                if not bool((gap <= tolerance).all()):
                    place = int(np.argmax(~(gap <= tolerance)))
                    findings.append(
                        f"stamped-versions: {sample.name}: the recorded log-prob of sampled token {place + 1} is "
                        f"{recorded[place]:.4f}, which differs by {gap[place]:.4g} nats from the one computed with the "
                        f"weights of version {version}"
                    )
    head = (
        f"spot checks: {len(chosen)} samples with {num_tokens:,} tokens; the largest difference is {largest:.2g} nats, "
        f"and up to {tolerance:g} nats are allowed"
    )
    others = [f"spot checks: {count:,} samples cannot be checked: {why}" for why, count in reasons.items() if count]
    return Spots(findings, [head, *others])


def _starting_model(folder: RunFolder) -> dict[int, Path]:
    """Version 0: the prepared model that the trainer started from, if it still exists.

    A relative path is that of the folder in which the run was started.
    """
    try:
        model = Path(json.loads(read_text(folder.processes / "trainer.json"))["model"]["path"]).expanduser()
        model = Path(str(folder.read_state().get("started_in", "."))) / model
        return {0: model} if (model / "config.json").is_file() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _choose(
    folder: RunFolder, usable: set[int], num_spots: int, chance: random.Random
) -> tuple[list[_Sample], Counter[str]]:
    """Choose samples, and count the others by the reason why they cannot be checked."""
    reasons, candidates = Counter[str](), []
    try:
        db, _ = open_ledger(folder)
        with contextlib.closing(db):
            check_schema(db, folder)
            rows = db.execute(
                "SELECT group_id, sample_index, first_version, last_version, file, offset, size FROM samples "
                "ORDER BY seq"
            )
            for group_id, index, first, last, *place in rows:
                if place[0] is None:
                    reasons["their tokens are no longer stored"] += 1
                elif first != last:
                    reasons["they were sampled by several versions"] += 1
                elif first not in usable:
                    reasons["their version has no checkpoint"] += 1
                else:
                    candidates.append((f"group {group_id} sample {index}", first, Location(*place)))
        chosen = chance.sample(candidates, min(num_spots, len(candidates)))
        return _read(folder, chosen), reasons
    except DAMAGED as error:
        if isinstance(error, UserError):
            raise
        remedy = "run areal-like verify without --spot to see what is damaged"
        raise UserError(f"the file cannot be read ({error})", where=str(folder.ledger), remedy=remedy) from error


def _read(folder: RunFolder, chosen: Sequence[tuple[str, int, Location]]) -> list[_Sample]:
    if not chosen:
        return []
    segments = SegmentStore(folder.root / SEGMENT_FOLDER, segment_bytes=1, fsync=False)
    try:
        return [_Sample(name, version, unpack_sample(segments.read(place))[0]) for name, version, place in chosen]
    finally:
        segments.close()


def _spec(config: RunConfig, checkpoint: Path, trajectories: Sequence[Trajectory]) -> SpotSpec:
    return SpotSpec(
        model_dir=str(checkpoint),
        dtype=config.model.dtype,
        temperature=config.sampling.temperature,
        num_threads=num_cores(),
        sequences=[(one.tokens_T.tolist(), one.loss_mask_T.tolist()) for one in trajectories],
    )


def _tolerance(config: RunConfig) -> float:
    engine = config.rollout.engine
    is_exact = config.model.dtype == "float32" and (engine.dtype or "float32") == "float32"
    return EXACT_NATS if is_exact and engine.device.startswith("cpu") else HALF_NATS


def _compute(spec: SpotSpec) -> list[list[float]]:
    with tempfile.TemporaryDirectory(prefix="areal-like-spot-") as name:
        source, target = Path(name) / "in.json", Path(name) / "out.json"
        source.write_bytes(msgspec.json.encode(spec))
        run_module([SPOT_LOGPROBS, str(source), str(target)], LIMIT_S)
        return msgspec.json.decode(target.read_bytes(), type=list[list[float]])
