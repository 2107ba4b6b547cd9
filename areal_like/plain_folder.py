"""Decrypted copies of model folders and checkpoints in shared memory, for libraries that map or open files themselves.

Only weight files are encrypted and copied; the copy has links to the others. A copy belongs to a process and is removed
at its end; copies of killed processes are removed by the next run or command (areal_like/store_owner.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from areal_like.encryption.files import copy_encrypted, copy_plain, key_to_read
from areal_like.encryption.master_key import KEY_FILE_VARIABLE
from areal_like.encryption.run_key import MARKER, RESTORE, check_key, encrypted_root
from areal_like.encryption.sealed_file import SealedFileError, is_sealed
from areal_like.errors import UserError
from areal_like.secret_values import SEALED_LOGS
from areal_like.store_owner import OWNER_FILE, SHARED_MEMORY, STORE_PREFIX, claim, sweep_dead

WEIGHTS = "*.safetensors"
PREFIX = f"{STORE_PREFIX}plain-"
MARGIN_BYTES = 1 << 20


def is_encrypted_model(folder: Path) -> bool:
    """Whether a folder has encrypted weights.

    Raises UserError if a file of weights is in the clear, although the folder is encrypted: it was exchanged.
    """
    found = {file: is_sealed(file) for file in sorted(folder.glob(WEIGHTS))}
    if not all(found.values()) and encrypted_root(folder) is not None:
        exchanged = next(file for file, is_one in found.items() if not is_one)
        what = "the file is not encrypted, although it belongs to encrypted data, so it was exchanged"
        raise SealedFileError(what, where=str(exchanged), remedy=RESTORE)
    return any(found.values())


@contextlib.contextmanager
def plain_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder itself if its weights are in the clear, else a decrypted copy that is removed afterwards.

    Raises UserError: the key is missing or another one, a file was changed, or shared memory is too small.
    """
    if not is_encrypted_model(folder):
        yield folder
        return
    copy = _copied(folder)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def plain_until_exit(folder: Path) -> Path:
    """As `plain_folder`, for the rest of this process."""
    if not is_encrypted_model(folder):
        return folder
    copy = _copied(folder)
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return copy


@contextlib.contextmanager
def filled_in_memory(folder: Path) -> Iterator[Path]:
    """Yield the folder to fill, or one in shared memory if it is encrypted; afterwards its weights are encrypted into
    `folder`, and other files copied. For writers that cannot write a stream. Raises UserError, OSError.
    """
    if encrypted_root(folder) is None:
        yield folder
        return
    check_key(folder)
    made = memory_folder()
    try:
        yield made
        for file in sorted(made.rglob("*")):
            target = folder / file.relative_to(made)
            if file.is_dir():
                target.mkdir(exist_ok=True)
            elif file.suffix == ".safetensors":
                copy_encrypted(file, target)
            elif file.name != OWNER_FILE:
                shutil.copyfile(file, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def decrypt_folder(source: Path, target: Path) -> int:
    """Copy a model folder into an existing empty folder, decrypted; returns the number of weight files
    that were encrypted. Raises UserError, OSError.
    """
    count = 0
    for file in sorted(source.iterdir()):
        if file.is_dir():
            shutil.copytree(file, target / file.name)
        elif is_sealed(file):
            key_to_read(file)
            copy_plain(file, target / file.name)
            count += 1
        elif file.name != MARKER:
            shutil.copyfile(file, target / file.name)
    return count


def required_memory() -> Path:
    """The folder of shared memory, for what must not be on a disk. Raises UserError: there is none."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        what = f"decrypted data is kept in {SHARED_MEMORY} only, which is missing or cannot be written"
        raise UserError(what, where="encryption", remedy="mount a tmpfs there")
    return SHARED_MEMORY


def memory_folder(num_bytes: int = 0) -> Path:
    """Make a private folder in shared memory, for `num_bytes`. The caller removes it; if it is killed, others do.

    Raises UserError: there is no shared memory, or too little.
    """
    required_memory()
    sweep_dead(SHARED_MEMORY, PREFIX)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < num_bytes + MARGIN_BYTES:
        what = f"the decrypted copy needs {num_bytes:,} bytes of {SHARED_MEMORY}, which has {free:,} free bytes"
        remedy = "enlarge it, such as with docker run --shm-size"
        raise UserError(what, where="encryption", remedy=remedy)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
    claim(folder)
    return folder


def _copied(folder: Path) -> Path:
    """Make a decrypted copy."""
    sealed = {file for file in folder.glob(WEIGHTS) if is_sealed(file)}
    for file in sealed:
        key_to_read(file)
    home = memory_folder(sum(file.stat().st_size for file in sealed))
    try:
        for file in sorted(folder.iterdir()):
            if file in sealed:
                copy_plain(file, home / file.name)
            elif file.name not in (OWNER_FILE, MARKER):  # with the marker, the copy would be an encrypted folder
                (home / file.name).symlink_to(file.resolve())
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return home


def protect_process(root: Path) -> None:
    """Let this process of an encrypted run, and its children, encrypt their log lines, and write temporary files to
    shared memory.
    """
    os.environ[SEALED_LOGS] = str(root)
    if moved := os.environ.get(KEY_FILE_VARIABLE):  # processes work in the folder in which the run was started
        os.environ[KEY_FILE_VARIABLE] = str(Path(moved).expanduser().absolute())
    use_memory_for_scratch()


def use_memory_for_scratch() -> None:
    """Let this process and its children write temporary files to shared memory, unless TMPDIR says where."""
    if "TMPDIR" not in os.environ and SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        os.environ["TMPDIR"] = str(SHARED_MEMORY)
        tempfile.tempdir = None
