"""`areal-like export` and `areal-like import`: conversion between checkpoints and Hugging Face folders.

This module finds the checkpoint and prints the result. The files are converted in the trainer package
(controller/wiring/checkpoints.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from areal_like.encryption.run_key import encrypted_root
from areal_like.errors import UserError
from areal_like.plain_folder import is_encrypted_model
from controller.run_folder.exports import EXPORTS_FILE, record_export
from controller.run_folder.locate import find_run_to_read
from controller.runs.hub import check_repository, push
from controller.runs.serving_words import serving_words
from controller.wiring.checkpoints import (
    checkpoint_digest,
    checkpoint_identity,
    checkpoint_problem,
    checkpoints_on_disk,
    decrypt_model,
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
    repository: str | None = None,
    is_public: bool = False,
    is_decrypted: bool = False,
) -> int:
    """Write a checkpoint as a Hugging Face folder, upload it to `repository` of the hub if given, and return the exit
    status. is_decrypted: write the model of an encrypted run in the clear. Raises UserError, OperationError."""
    if repository is not None:
        check_repository(repository)
    elif is_public:
        raise UserError(
            "--public requires a repository", where="--public", remedy="add the option --push-to-hub USER/NAME"
        )
    folder = best_checkpoint(source) if best else checkpoint_of(source, version)
    target = Path(out).expanduser().resolve()
    if is_decrypted and encrypted_root(target) is not None:
        raise UserError("the folder is within an encrypted one", where=out, remedy="choose a different folder")
    is_encrypted = encrypted_root(folder) is not None and not is_decrypted
    if repository is not None and is_encrypted:
        what = "the run is encrypted, and a repository with encrypted weights cannot be used"
        raise UserError(what, where="--push-to-hub", remedy="add --decrypt to upload the model in the clear")
    found = export_checkpoint(folder, target, dtype, lora, is_decrypted=is_decrypted)
    print(f"{target}: exported {folder.name} of {folder.parent.parent.name} with weights in {found}")
    if is_encrypted:
        print(f"  the weights are encrypted; for other software: areal-like decrypt {target} NEW_FOLDER")
    for line in () if is_encrypted else serving_words(target):
        print(f"  {line}")
    _record(folder, target)
    if repository is not None:
        message = f"{folder.name} of {folder.parent.parent.name}"
        print(f"uploaded the model to {push(target, repository, is_public=is_public, message=message)}")
        _record(folder, target, repository)
    return 0


def _record(folder: Path, target: Path, repository: str = "") -> None:
    """Add an exported folder to those of the run, for `areal-like lineage`. A copy of a checkpoint has no run here."""
    root = folder.parent.parent
    if not (root / "ledger.sqlite").is_file():
        return
    _, lineage, version = checkpoint_identity(folder)
    try:
        record_export(
            root, path=target, version=version, lineage=lineage, checkpoint=checkpoint_digest(folder),
            repository=repository,
        )  # fmt: skip
    except OSError as error:  # the run may be another user's
        print(
            f"note: {root / EXPORTS_FILE} cannot be written ({error.strerror}), so areal-like lineage will not list "
            f"{target}"
        )


def decrypt(source: str, out: str) -> int:
    """Copy an encrypted model folder to a new folder in the clear; return the exit status. Raises UserError,
    OperationError."""
    folder, target = Path(source).expanduser(), Path(out).expanduser().resolve()
    if not folder.is_dir() or not is_encrypted_model(folder):
        what = "there is no such folder" if not folder.is_dir() else "the folder has no encrypted weights"
        remedy = "specify a model exported from an encrypted run, such as RUN/final"
        raise UserError(what, where=source, remedy=remedy)
    if is_checkpoint(folder):
        what = "the folder is a checkpoint"
        raise UserError(what, where=source, remedy=f"run areal-like export {source} {out} --decrypt")
    if encrypted_root(target) is not None:
        raise UserError("the folder is within an encrypted one", where=out, remedy="choose a different folder")
    num_files = decrypt_model(folder, target)
    print(
        f"{target}: decrypted {num_files} weight file{'s' * (num_files != 1)}; this folder is not protected by the key"
    )
    return 0


def best_checkpoint(source: str) -> Path:
    """The folder of a run's best checkpoint. Raises UserError."""
    run = find_run_to_read(source)
    found = sorted(path for path in run.best.glob("*") if is_checkpoint(path))
    if not found:
        remedy = "set trainer.checkpoint.best: {} before you start a run"
        raise UserError("the run has no best checkpoint", where=str(run.best), remedy=remedy)
    if (problem := checkpoint_problem(found[-1])) is not None:
        raise UserError(
            f"the best checkpoint is damaged: {problem}", where=str(found[-1]), remedy="export a different checkpoint"
        )
    return found[-1]


def import_model(source: str, out: str) -> int:
    """Make a checkpoint from a Hugging Face folder and return the exit status. Raises UserError, OperationError."""
    folder, target = Path(source).expanduser(), Path(out).expanduser().resolve()
    if not folder.is_dir():
        raise UserError("there is no such folder", where=source, remedy="specify the folder of a model")
    if is_checkpoint(folder):
        raise UserError(
            "the folder is already a checkpoint",
            where=source,
            remedy="use the checkpoint without importing it, or export it",
        )
    num_tensors, dtype = import_folder(folder, target)
    print(f"{target}: imported {num_tensors} tensors from {source} (source dtype: {dtype})")
    return 0


def checkpoint_of(source: str, version: int | None) -> Path:
    """The folder of a checkpoint. source: the folder itself, or a run; version: the one of a run; None: the newest
    complete one. Raises UserError."""
    folder = Path(source).expanduser()
    if is_checkpoint(folder):
        if version is not None:
            raise UserError(
                "a checkpoint has only one version",
                where="--version",
                remedy="remove --version, or specify the run instead",
            )
        return folder.resolve()
    run = find_run_to_read(source)
    known = checkpoints_on_disk(run.root)
    if version is not None:
        for number, path in known:
            if number == version:
                return path
        there = ", ".join(str(number) for number, _ in known) or "none"
        raise UserError(
            f"there is no checkpoint of version {version}", where=str(run.root), remedy=f"available versions: {there}"
        )
    for _, path in reversed(known):
        if checkpoint_problem(path) is None:
            return path
    remedy = (
        "use areal-like checkpoint while the run is in progress"
        if not known
        else "restore a checkpoint from a backup; all checkpoints are damaged"
    )
    raise UserError("the run has no complete checkpoint", where=str(run.root), remedy=remedy)
