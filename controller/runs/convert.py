"""`areal-like export` and `areal-like import`: convert between checkpoints and Hugging Face folders.

Finds the checkpoint and prints the result. Files are converted by the trainer package, started through
process_specs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from areal_like.errors import UserError
from controller.run_folder.locate import find_run_to_read
from controller.wiring.checkpoints import (
    checkpoint_problem,
    checkpoints_on_disk,
    export_checkpoint,
    import_folder,
    is_checkpoint,
)


def export(
    source: str,
    out: str,
    *,
    version: int | None,
    best: bool = False,
    dtype: str | None,
    lora: Literal["merged", "adapter"] | None,
) -> int:
    """Convert a checkpoint to a Hugging Face folder; return the exit status. Raises UserError, OperationError."""
    folder = best_checkpoint(source) if best else checkpoint_of(source, version)
    target = Path(out).expanduser().resolve()
    found = export_checkpoint(folder, target, dtype, lora)
    print(f"{target}: {folder.name} of {folder.parent.parent.name}, weights in {found}")
    return 0


def best_checkpoint(source: str) -> Path:
    """The folder of a run's best checkpoint. Raises UserError."""
    run = find_run_to_read(source)
    found = sorted(path for path in run.best.glob("*") if is_checkpoint(path))
    if not found:
        remedy = "trainer.checkpoint.best: {} keeps one from the start on"
        raise UserError("this run has no best checkpoint", where=str(run.best), remedy=remedy)
    if (problem := checkpoint_problem(found[-1])) is not None:
        raise UserError(f"the best checkpoint is damaged: {problem}", where=str(found[-1]), remedy="export another")
    return found[-1]


def import_model(source: str, out: str) -> int:
    """Convert a Hugging Face folder to a checkpoint; return the exit status. Raises UserError, OperationError."""
    folder, target = Path(source).expanduser(), Path(out).expanduser().resolve()
    if not folder.is_dir():
        raise UserError("there is no such folder", where=source, remedy="name the folder of a model")
    if is_checkpoint(folder):
        raise UserError("this is a checkpoint already", where=source, remedy="use it as it is, or export it")
    num_tensors, dtype = import_folder(folder, target)
    print(f"{target}: {num_tensors} tensors, {dtype} in {source}")
    return 0


def checkpoint_of(source: str, version: int | None) -> Path:
    """The folder of a checkpoint, given by its path or by its run: this version, or the newest complete one. Raises
    UserError.
    """
    folder = Path(source).expanduser()
    if is_checkpoint(folder):
        if version is not None:
            raise UserError("a checkpoint has one version", where="--version", remedy="leave it out, or name the run")
        return folder.resolve()
    run = find_run_to_read(source)
    known = checkpoints_on_disk(run.root)
    if version is not None:
        for number, path in known:
            if number == version:
                return path
        there = ", ".join(str(number) for number, _ in known) or "none"
        raise UserError(
            f"there is no checkpoint of version {version}", where=str(run.root), remedy=f"there are: {there}"
        )
    for _, path in reversed(known):
        if checkpoint_problem(path) is None:
            return path
    remedy = "areal-like checkpoint makes one while it runs" if not known else "every one of them is damaged"
    raise UserError("this run has no whole checkpoint", where=str(run.root), remedy=remedy)
