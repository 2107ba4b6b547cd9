"""Checkpoints and exports of the trainer, for commands of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from areal_like.errors import UserError, WeightError
from areal_like.plain_folder import decrypt_folder
from trainer.checkpoints import adapter_export, compare_export, convert, provenance
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.checkpoint import (
    MANIFEST,
    STATE,
    added,
    all_checkpoints,
    manifest_digest,
    read_state,
    repair,
    verify,
)


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


def has_manifest(folder: Path) -> bool:
    """Return whether the folder has the manifest of a complete checkpoint."""
    return (folder / MANIFEST).is_file()


def added_files(folder: Path) -> list[str]:
    """Files of a checkpoint that are not in its manifest; call it after `checkpoint_problem` found none."""
    return added(folder)


def checkpoint_problem(folder: Path, ledger_seq: int | None = None) -> str | None:
    """Why this checkpoint cannot be used (with a ledger of the given number of facts), or None if it can."""
    try:
        verify(folder)
        position = read_state(folder).position
    except WeightError as error:
        return str(error)
    if ledger_seq is not None and position.ledger_seq > ledger_seq:
        return (
            f"the checkpoint was written when the ledger contained {position.ledger_seq} facts, but the ledger "
            f"contains only {ledger_seq}"
        )
    return None


def export_checkpoint(
    folder: Path, out: Path, dtype: str | None, lora: adapter_export.Form | None, *, is_decrypted: bool = False
) -> str:
    """Convert a checkpoint to a Hugging Face folder; return the data type of its weights. Raises UserError,
    OperationError.

    lora: form of an adapter; None: merged. is_decrypted: write the model of an encrypted run in the clear.
    """
    if adapter_export.holds_adapter(folder):
        return adapter_export.export_adapter(folder, out, form=lora or "merged", dtype=dtype, is_decrypted=is_decrypted)
    if lora is not None:
        raise UserError(
            "the checkpoint contains a full model, not an adapter", where="--lora", remedy="remove the option --lora"
        )
    return convert.export_checkpoint(folder, out, dtype=dtype, is_decrypted=is_decrypted)


def decrypt_model(source: Path, out: Path) -> int:
    """Copy an encrypted model folder into a new folder in the clear; return the number of files that were encrypted.
    Raises UserError, OperationError.
    """
    convert.refuse_filled(out)
    with atomic_folder(out) as partial:
        num_files = decrypt_folder(source, partial)
        provenance.renew_digests(partial)
    return num_files


def import_folder(source: Path, out: Path) -> tuple[int, str]:
    """Convert a Hugging Face folder to a checkpoint; return the number of tensors and their type. Raises UserError,
    OperationError.
    """
    return convert.import_folder(source, out)


def holds_adapter(folder: Path) -> bool:
    """Return whether a checkpoint holds an adapter instead of the whole model."""
    return adapter_export.holds_adapter(folder)


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has that of every file; empty if there is none."""
    return manifest_digest(folder)


def checkpoint_identity(folder: Path) -> tuple[str, str, int]:
    """Run, lineage and version in a checkpoint's state. Raises WeightError (damaged)."""
    state = read_state(folder)
    return state.run_id, state.lineage, state.version


class Export(NamedTuple):
    """What an exported model says about itself (provenance.json), and what differs from it.

    checkpoint: SHA-256 of the manifest of the checkpoint that it was made from.
    """

    run_id: str
    lineage: str
    version: int
    checkpoint: str
    changed: tuple[str, ...]


def read_export(folder: Path) -> Export | None:
    """Read where an exported model comes from and compare its files; None if it does not say. Raises WeightError."""
    found = provenance.read_provenance(folder)
    if found is None:
        return None
    changed = tuple(provenance.changed_files(folder, found))
    return Export(found.run_id, found.lineage, found.version, found.checkpoint, changed)


def export_origin(folder: Path) -> tuple[str, str, int, str] | None:
    """Run, lineage, version and checkpoint's digest in provenance.json, without comparing files; None if there is none.
    Raises WeightError (damaged).
    """
    found = provenance.read_provenance(folder)
    return None if found is None else (found.run_id, found.lineage, found.version, found.checkpoint)


def other_tensor(folder: Path, checkpoint: Path) -> str | None:
    """Name the first tensor of an exported model that is not the checkpoint's; None if all are, or the checkpoint holds
    an adapter. Raises UserError, WeightError.
    """
    if adapter_export.holds_adapter(checkpoint):
        return None
    return compare_export.other_tensor(folder, checkpoint)
