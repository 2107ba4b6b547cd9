"""Compares the tensors of an exported model with those of its checkpoint. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from areal_like.plain_folder import plain_folder
from trainer.checkpoints.convert import narrowed, read_stored, stored_tensors, widened


def other_tensor(folder: Path, checkpoint: Path) -> str | None:
    """Name the first tensor of an export that is not the checkpoint's, rounded to its type; None if all are.

    For checkpoints of whole models. Raises UserError, WeightError (damaged).
    """
    with plain_folder(folder) as export, plain_folder(checkpoint) as source:
        return _other_tensor(export, source)


def _other_tensor(folder: Path, checkpoint: Path) -> str | None:
    exported, saved = stored_tensors(folder), stored_tensors(checkpoint)
    for name in sorted(exported.keys() | saved.keys()):
        if name not in exported or name not in saved:
            return f"{name} (only in the {'export' if name in exported else 'checkpoint'})"
        data, wanted = read_stored(exported[name]), read_stored(saved[name])
        if exported[name].dtype != saved[name].dtype:
            wanted = narrowed(widened(wanted, saved[name].dtype), exported[name].dtype)
        if data != wanted:
            return name
    return None
