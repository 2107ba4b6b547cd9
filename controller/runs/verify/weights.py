"""Compares checkpoints and exported models with the digests in the ledger (`recorded-chain`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.errors import WeightError
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.chain import Chain
from controller.runs.verify.damaged import DAMAGED
from controller.runs.verify.run_files import IN_PROGRESS
from controller.wiring.checkpoints import (
    added_files,
    checkpoint_digest,
    checkpoint_identity,
    checkpoint_problem,
    checkpoints_on_disk,
    has_manifest,
    is_checkpoint,
    other_tensor,
    read_export,
)


@dataclass
class Weights:
    """What was found. `breaks`: one line each."""

    breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: set[Path] = field(default_factory=set)
    """Folders of the checkpoints of the run that were checked."""
    num_checkpoints: int = 0
    num_exports: int = 0


def check_weights(folder: RunFolder, chain: Chain, run_id: str, status: str, found: Weights) -> None:
    """Check every checkpoint of a run, the best one, and its final model, and add what is found to `found`."""
    for version, path in [*checkpoints_on_disk(folder.root), *_best(folder)]:
        problems = _problems(path, version, chain, run_id, found.notes, status)
        if problems and status in IN_PROGRESS and not is_checkpoint(path):
            continue  # removed meanwhile, as retention does
        found.num_checkpoints += 1
        found.breaks += problems
        found.checked.add(path.resolve())
    if status not in IN_PROGRESS:
        found.breaks += [
            f"{path} has no manifest.json, so it is not a complete checkpoint" for path in _incomplete(folder)
        ]
    if (folder.final / "config.json").is_file():
        check_export(folder, folder.final, chain, run_id, found, is_last=status == "finished")
    elif folder.final.is_dir() and status not in IN_PROGRESS:
        found.breaks.append(f"{folder.final} has no config.json, so it is not a complete model")
    elif status == "finished" and chain.policy_digests:
        found.breaks.append(f"{folder.final} is missing, although the run is finished")


def check_checkpoint(path: Path, chain: Chain, run_id: str, status: str, found: Weights) -> None:
    """Check one checkpoint that is stored outside of its run."""
    found.num_checkpoints += 1
    found.breaks += _problems(path, None, chain, run_id, found.notes, status)


def check_export(folder: RunFolder, export: Path, chain: Chain, run_id: str, found: Weights, *, is_last: bool) -> None:
    """Check an exported model of a run: its files, its checkpoint, and its tensors if the checkpoint is on disk.

    is_last: it must be the version after the last step.
    """
    try:
        recorded = read_export(export)
    except WeightError as error:
        found.breaks.append(str(error))
        return
    if recorded is None:
        found.notes.append(
            f"{export} has no provenance.json, because it was exported by an earlier version of areal_like"
        )
        return
    found.num_exports += 1
    found.breaks += recorded.changed
    if recorded.run_id != run_id:
        found.breaks.append(f"{export} belongs to run {recorded.run_id!r}, not {run_id!r}")
    if is_last and chain.policy_digests and recorded.version != max(chain.policy_digests):
        steps = max(chain.policy_digests)
        found.breaks.append(f"{export} contains version {recorded.version}, but the ledger has {steps} steps")
    key = (recorded.version, recorded.lineage)
    digest = chain.checkpoints.get(key)
    if digest is None and chain.has_digests and key in chain.checkpoints:
        found.notes.append(f"{export}: the digest of the checkpoint is not in the ledger")
    elif chain.has_digests and digest != recorded.checkpoint:
        found.breaks.append(f"{export}: the checkpoint is not the one of version {recorded.version} in the ledger")
    saved = dict(checkpoints_on_disk(folder.root)).get(recorded.version)
    if saved is None:
        found.notes.append(
            f"{export}: the tensors were not compared, because checkpoint {recorded.version} is no longer stored"
        )
        return
    try:
        if (name := other_tensor(export, saved)) is not None:
            found.breaks.append(f"{export}: the tensor {name} differs from the one in checkpoint {saved.name}")
    except DAMAGED as error:
        found.breaks.append(f"{export}: the tensors cannot be compared ({error})")


def _best(folder: RunFolder) -> Iterator[tuple[int | None, Path]]:
    if folder.best.is_dir():
        yield from ((None, path) for path in sorted(folder.best.glob("*")) if is_checkpoint(path))


def _incomplete(folder: RunFolder) -> list[Path]:
    paths = [*folder.checkpoints.glob("step_*"), *folder.best.glob("step_*")]
    return sorted(path for path in paths if path.is_dir() and not has_manifest(path))


def _problems(path: Path, version: int | None, chain: Chain, run_id: str, notes: list[str], status: str) -> list[str]:
    try:
        return list(_checkpoint(path, version, chain, run_id, notes, status))
    except DAMAGED as error:
        return [f"{path} cannot be read ({error})"]


def _checkpoint(
    path: Path, version: int | None, chain: Chain, run_id: str, notes: list[str], status: str
) -> Iterator[str]:
    if (problem := checkpoint_problem(path)) is not None:
        yield problem
        return
    yield from (f"{path / name} is not in manifest.json, because it was added later" for name in added_files(path))
    own_id, lineage, own_version = checkpoint_identity(path)
    if version is not None and own_version != version:
        yield f"{path} is a checkpoint of version {own_version}, not {version}"
        return
    if own_id != run_id:
        yield f"{path} belongs to run {own_id!r}, not {run_id!r}"
    if not chain.has_digests:
        return
    if (own_version, lineage) not in chain.checkpoints:
        text = f"{path}: the ledger has no checkpoint of version {own_version} (lineage {lineage})"
        if status == "finished" and lineage in ("", *chain.lineages[-1:]):
            yield text
        else:
            notes.append(f"{text}; the session ended before the checkpoint was reported")
        return
    recorded = chain.checkpoints[own_version, lineage]
    if recorded is None:
        notes.append(f"{path}: the digest is not in the ledger")
    elif recorded != checkpoint_digest(path):
        yield f"{path} is not the checkpoint of version {own_version} in the ledger"
