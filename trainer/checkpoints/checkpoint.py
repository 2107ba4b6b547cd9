"""Checkpoints as folders: paths, manifest, verification, the choice of the newest, and retention. Imports no torch.

A checkpoint is <run>/checkpoints/step_000020/ with its manifest and state.json. The training state is defined in
trainer/training_state.py; trainer/saving.py decides when to save.

A folder becomes visible by one rename after its manifest (sha256 of each file) was written last. A folder that exists
is therefore complete and consistent; the manifest detects later damage. Folders newer than the one just saved belong to
a lineage that was rolled back; they are removed once the new one is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import WeightError
from areal_like.weights.tensor_parts import has_parts
from areal_like.wire.messages import RunPosition
from trainer.checkpoints.atomic_folder import atomic_folder, remove_folder, sweep

log = logging.getLogger(__name__)

FORMAT, PARTS_FORMAT = 2, 3
"""Of the manifest: of a checkpoint that is a model's folder, and of one with the parts of ranks."""
MANIFEST = "manifest.json"
STATE = "state.json"
CRITIC = "critic.safetensors"
"""File of a run with a critic; not part of the policy."""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of a run with an adapter instead of the model, in peft's format."""
ADAPTER_BASE = "adapter_base.json"
"""Identity of the adapter's base: a dtype, and the CRC-32 of every tensor in this dtype, by name."""
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of state.json: the policy's version and the progress of the run.

    version: policy version, equal to the number of completed steps. counters: the trainer's monotonic counters.
    config_digest: sha256 over the settings it was trained with. generators: states of Python's and NumPy's generators.
    position: of data and ledger when the batch of step `version` was sent. staleness: groups trained on, by their
    staleness, along the lineage of this version.
    """

    version: int
    lineage: str
    run_id: str
    config_digest: str
    counters: dict[str, float] = {}
    generators: dict[str, Any] = {}
    position: RunPosition = RunPosition()
    staleness: dict[int, int] = {}
    origin_dtype: str = "float32"
    """Original dtype of an imported model, in which it is exported."""
    saved_at_s: float = 0.0
    format: int = FORMAT


def checkpoint_folder(run_dir: Path, version: int) -> Path:
    """Return the folder of the checkpoint of `version`."""
    return run_dir / "checkpoints" / f"step_{version:06d}"


def all_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (version, folder) of every complete checkpoint, oldest first, without temporary folders."""
    found = []
    for folder in (run_dir / "checkpoints").glob("step_*"):
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match and (folder / MANIFEST).is_file():
            found.append((int(match[1]), folder))
    return sorted(found)


def repair(run_dir: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted, and remove what killed writers left.

    Only call this while no trainer of the run is running. A folder that cannot be written is left as it is; `save`
    raises an error for it.
    """
    try:
        sweep(run_dir / "checkpoints", are_writers_gone=True)
    except OSError as error:
        log.warning("%s could not be cleaned up: %s", run_dir / "checkpoints", error)


def latest(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, unverified; None if there is none."""
    found = all_checkpoints(run_dir)
    return found[-1][1] if found else None


def verify(folder: Path, *, share: int = 0, num_shares: int = 1) -> None:
    """Raise WeightError, naming the file, if `folder` is not a checkpoint or a file is missing or has changed.

    share, num_shares: read only this share of the files; the other ranks of a trainer read the others.
    """
    manifest = folder / MANIFEST
    try:
        recorded = json.loads(manifest.read_text())
        is_known, files = recorded["format"] in (FORMAT, PARTS_FORMAT), dict(recorded["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{manifest} is missing or damaged, so this is not a complete checkpoint") from error
    if not is_known:
        raise WeightError(
            f"{manifest} has format {recorded['format']}, but this version of areal_like reads formats {FORMAT} and "
            f"{PARTS_FORMAT}"
        )
    for name, entry in sorted(files.items())[share::num_shares]:
        file = folder / name
        try:
            num_bytes, digest = _measure(file)
        except (OSError, ValueError) as error:
            raise WeightError(f"{file} of the checkpoint cannot be read ({error})") from error
        if not isinstance(entry, dict) or [num_bytes, digest] != [entry.get("num_bytes"), entry.get("sha256")]:
            raise WeightError(f"{file} is damaged: its checksum differs from the recorded one")


def added(folder: Path) -> list[str]:
    """Names of the files in a checkpoint's folder that its manifest does not have. Raises OSError, ValueError."""
    recorded = {MANIFEST, *json.loads((folder / MANIFEST).read_text())["files"]}
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}
    return sorted(there - recorded)


def manifest_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has that of every file; empty if there is no manifest."""
    try:
        return _measure(folder / MANIFEST)[1]
    except OSError:
        return ""


def read_state(folder: Path) -> CheckpointState:
    """Read state.json of a checkpoint. Raises WeightError if it is missing or damaged."""
    file = folder / STATE
    try:
        return msgspec.json.decode(file.read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightError(f"{file} is missing or damaged ({error})") from error


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints to keep: the newest `keep`, and older ones that are at least `every_s` apart (None: none)."""

    keep: int
    every_s: float | None = None


Facts = Mapping[str, tuple[int, str]]
"""Size and sha256 by file name, of files whose writer has computed them."""


def save(
    run_dir: Path, state: CheckpointState, write: Callable[[Path], Facts | None], retention: Retention
) -> tuple[Path, int]:
    """Write the checkpoint of `state.version`: `write` fills the folder, then state.json, then the manifest.

    Returns the folder and its bytes. Afterwards checkpoints are removed according to `retention`. Raises OperationError
    if writing fails; older checkpoints are unchanged.
    """
    target = checkpoint_folder(run_dir, state.version)
    with atomic_folder(target) as partial:
        num_bytes = fill(partial, state, write)
    _retain(run_dir, version=state.version, retention=retention)
    return target, num_bytes


def fill(folder: Path, state: CheckpointState, write: Callable[[Path], Facts | None]) -> int:
    """Write everything that is part of a checkpoint, the manifest last; returns its bytes."""
    facts = dict(write(folder) or {})
    stamped = msgspec.structs.replace(state, saved_at_s=time.time())
    (folder / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(stamped), indent=1))
    files, total_bytes = {}, 0
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = str(file.relative_to(folder))
            num_bytes, digest = facts.get(name) or _measure(file)
            files[name] = {"num_bytes": num_bytes, "sha256": digest}
            total_bytes += num_bytes
    number = PARTS_FORMAT if has_parts(folder) else FORMAT
    (folder / MANIFEST).write_text(json.dumps({"format": number, "files": files}, indent=1))
    return total_bytes


def _retain(run_dir: Path, *, version: int, retention: Retention) -> None:
    everything = all_checkpoints(run_dir)
    line = [entry for entry in everything if entry[0] <= version]
    surviving = line[-retention.keep :]
    if retention.every_s is not None:
        surviving = _spaced(line[: -retention.keep], retention.every_s) + surviving
    for entry in everything:
        if entry not in surviving:
            try:
                remove_folder(entry[1])
            except OSError as error:  # the new one is complete: an extra one must not end a run
                log.warning("checkpoint %s cannot be removed: %s", entry[1], error)


def _spaced(entries: list[tuple[int, Path]], every_s: float) -> list[tuple[int, Path]]:
    """Return the first entry, and each that was saved at least `every_s` after the last one chosen."""
    chosen: list[tuple[int, Path]] = []
    last_s = -float("inf")
    for entry in entries:
        try:
            saved_at_s = read_state(entry[1]).saved_at_s
        except WeightError as error:
            log.warning("checkpoint %s is damaged and is not kept: %s", entry[1], error)
            continue
        if saved_at_s - last_s >= every_s:
            chosen.append(entry)
            last_s = saved_at_s
    return chosen


def _measure(file: Path) -> tuple[int, str]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return opened.tell(), digest
