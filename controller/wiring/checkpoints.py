"""Checkpoints and exports of the trainer, for commands of the controller."""

from __future__ import annotations

from pathlib import Path

from areal_like.errors import UserError, WeightError
from trainer.checkpoints import adapter_export, convert
from trainer.checkpoints.checkpoint import MANIFEST, STATE, all_checkpoints, read_state, repair, verify


def checkpoints_on_disk(run_dir: Path) -> list[tuple[int, Path]]:
    """(version, folder) of the checkpoints of a run, oldest first; unverified."""
    return all_checkpoints(run_dir)


def checkpoint_origin(folder: Path) -> tuple[str, str, int] | None:
    """Run, lineage and number of ledger facts recorded in a checkpoint; None if it cannot be read. Unverified."""
    try:
        state = read_state(folder)
    except WeightError:
        return None
    return state.run_id, state.lineage, state.position.ledger_seq


def repair_checkpoints(run_dir: Path) -> None:
    """Repair the checkpoints of a trainer that was killed while saving. No trainer of the run may be running."""
    repair(run_dir)


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder looks like a checkpoint; unverified."""
    return (folder / MANIFEST).is_file() and (folder / STATE).is_file()


def checkpoint_problem(folder: Path, ledger_seq: int | None = None) -> str | None:
    """Why this checkpoint cannot be used (with a ledger of the given number of facts), or None if it can."""
    try:
        verify(folder)
        position = read_state(folder).position
    except WeightError as error:
        return str(error)
    if ledger_seq is not None and position.ledger_seq > ledger_seq:
        return f"it was made when the ledger held {position.ledger_seq} facts, and this one holds {ledger_seq}"
    return None


def export_checkpoint(folder: Path, out: Path, dtype: str | None, lora: adapter_export.Form | None) -> str:
    """Convert a checkpoint to a Hugging Face folder; return the data type of its weights. Raises UserError,
    OperationError.

    lora: form of an adapter; None: merged.
    """
    if adapter_export.holds_adapter(folder):
        return adapter_export.export_adapter(folder, out, form=lora or "merged", dtype=dtype)
    if lora is not None:
        raise UserError("the checkpoint holds a whole model", where="--lora", remedy="leave it out")
    return convert.export_checkpoint(folder, out, dtype=dtype)


def import_folder(source: Path, out: Path) -> tuple[int, str]:
    """Convert a Hugging Face folder to a checkpoint; return the number of tensors and their type. Raises UserError,
    OperationError.
    """
    return convert.import_folder(source, out)
