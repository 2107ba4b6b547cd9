"""A folder that is written completely or not at all, even if the writer is killed. Imports no torch.

A folder is written as `.<name>.<pid>.partial` next to its target and renamed when complete. Replacing an existing
target takes two renames (`.<name>.<pid>.replaced` first); `sweep` reverts the first if the second did not happen. It
also removes what dead writers left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from areal_like.errors import OperationError, UserError

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(?P<kind>partial|replaced)")


@contextlib.contextmanager
def atomic_folder(target: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `target` on a normal exit and is removed on an exception.

    replaces: an existing `target` is replaced. Otherwise a target that another process completed meanwhile is kept, and
    ours is discarded: for writers of equal content, whose readers must not lose the folder while they use it.
    Raises OperationError if writing fails (an existing `target` is unchanged), UserError if the parent folder cannot be
    written.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        partial = parent / f".{target.name}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _refused(target, error) from error
        raise UserError(
            f"the folder cannot be written ({error.strerror})",
            where=str(parent),
            remedy="choose a different folder, or change the permissions of this one",
        ) from error
    try:
        yield partial
        _flush(partial)
        if replaces or not _is_filled(target):
            _move_into_place(partial, target)
    except (OSError, SafetensorError) as error:
        raise _refused(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sweep(parent: Path, *, are_writers_gone: bool = False) -> None:
    """Remove what dead writers left in `parent`; restore a target that was being replaced and is now missing.

    are_writers_gone: the caller knows that all of them ended. Otherwise the files of a process id that exists are kept,
    even if it is another process now or the writer ran on another machine.
    """
    for leftover in sorted(parent.glob(".*")):
        match = _LEFTOVER.fullmatch(leftover.name)
        if match is None:
            continue
        pid = int(match["pid"])
        if not are_writers_gone and pid != os.getpid() and _is_alive(pid):
            continue
        target = parent / match["name"]
        if match["kind"] == "replaced" and not target.exists():
            os.rename(leftover, target)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that its name is gone at once: a kill never leaves an incomplete folder with this name."""
    trash = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _move_into_place(partial: Path, target: Path) -> None:
    replaced = target.parent / f".{target.name}.{os.getpid()}.replaced"
    if target.exists():
        os.rename(target, replaced)
    try:
        os.rename(partial, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    _flush_folder(target.parent)


def _flush(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(target: Path, error: Exception) -> OperationError:
    is_full = "No space left" in str(error) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )
    why = "the disk is full" if is_full else str(error)
    return OperationError(f"could not write {target}: {why}; the previous contents are unchanged")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
