"""Folders of a session other than the run folder: for the ledger, the weight store, and the rendezvous of ranks.

Determines their location, acquires the ledger's lock, and removes them at the end (through the session's exit stack).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from areal_like import reaper
from areal_like.encryption.run_key import encrypted_root
from areal_like.errors import UserError
from areal_like.plain_folder import memory_folder
from areal_like.store_owner import SHARED_MEMORY, claim, sweep_dead
from areal_like.weights.weight_store import WeightStore, default_root
from controller.config.launchers import launcher_of
from controller.config.model_folder import weight_bytes
from controller.config.run_config import RunConfig
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.ledger.mirror import LedgerHome
from controller.run_folder.run_folder import RunFolder
from controller.runtime.continuity import refuse_absent_ledger
from controller.runtime.open_session import OpenSession

MIN_STORE_BYTES = 64 << 20
"""Minimum of shared memory, also if the model's size is not known yet."""


def open_ledger_home(
    config: RunConfig, folder: RunFolder, run_id: str, stack: contextlib.ExitStack
) -> LedgerHome | None:
    """Open the ledger's location if it is not in the run folder; it is mirrored there, for the last time at the end."""
    mirroring = launcher_of(config).mirroring(config.launch)
    if mirroring is None:
        return None
    local_dir = Path(mirroring.local_dir).expanduser() if mirroring.local_dir else None
    home = LedgerHome(folder.root, local_dir, run_id)
    home.open()
    stack.callback(home.close)
    return home


def open_ledger(
    config: RunConfig, folder: RunFolder, run_id: str, home: LedgerHome | None, *, is_resume: bool, accept_loss: bool
) -> Ledger:
    """Open the ledger and acquire the lock of the folder. Raises UserError if another process has it.

    A run that was stopped during its preparation has an empty ledger; a run that has made progress must have one.
    """
    root = home.folder if home else folder.root
    if is_resume:
        refuse_absent_ledger(folder, root / LEDGER_FILE, accept_loss=accept_loss)
    return Ledger(
        root,
        run_id=run_id,
        segment_bytes=int(config.ledger.segment_mb * 2**20),
        keep_bytes=None if config.ledger.keep_mb is None else int(config.ledger.keep_mb * 2**20),
        fsync=config.ledger.fsync,
    )


@contextlib.asynccontextmanager
async def mirrored(session: OpenSession, saved_version: Callable[[], int]) -> AsyncIterator[None]:
    """Keep the run folder's copy of the ledger up to date meanwhile, if it is a mirror."""
    mirroring = launcher_of(session.config).mirroring(session.config.launch)
    if session.ledger_home is None or mirroring is None:
        yield
        return
    keeping = asyncio.create_task(session.ledger_home.keep_up(saved_version, mirroring.every_s, session.note))
    try:
        yield
    finally:
        keeping.cancel()


def open_weight_folder(session: OpenSession, model_dir: Path) -> Path:
    """Open the weight store's folder, in shared memory if all versions that are kept at once fit."""
    config, run_dir, stack = session.config, session.folder.root, session.stack
    weights = config.trainer.weights
    need_bytes = max(MIN_STORE_BYTES, weight_bytes(model_dir) * (weights.keep + 1))
    disk_dir = Path(weights.shared_dir) / session.run_id if weights.shared_dir else run_dir
    is_one_machine = launcher_of(config).is_one_machine
    place = weights.place if is_one_machine else "disk"  # each node has its own shared memory
    folder = default_root(session.run_id, place, disk_dir, need_bytes)
    if folder.is_relative_to(run_dir) and encrypted_root(run_dir) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        what = f"the weight versions of an encrypted run must be in {SHARED_MEMORY}, which has no room for them"
        raise UserError(what, where="encryption", remedy=f"provide {need_bytes >> 20} MiB of shared memory")
    if place == "shm" and folder.is_relative_to(run_dir):
        session.note(f"shared memory has too little free space, so weights are transferred through {folder}", "warning")
    with contextlib.suppress(OSError):  # without it the next run removes what a killed one has left
        stack.callback(reaper.start())
    stack.callback(sweep_dead)  # files of killed workers
    stack.callback(WeightStore(folder, weights.layout, keep=2).close, remove=True)
    return folder


def evaluated_model(session: OpenSession) -> Path:
    """The folder that an evaluation prepares its model in: that of the run, or shared memory if the run is encrypted.

    Raises UserError.
    """
    root = session.folder.root
    if encrypted_root(root) is None:
        return root / "model"
    made = memory_folder()
    session.stack.callback(shutil.rmtree, made, ignore_errors=True)
    return made / "model"


def sweep_dead_folders() -> None:
    """Remove folders left by killed controllers and workers."""
    sweep_dead()
    sweep_dead(Path(tempfile.gettempdir()))  # rendezvous folders if there is no shared memory


def rendezvous_address(folder: Path) -> str:
    """Address of the rendezvous of the trainer's ranks: a file that only this user can open, a new one for each start.

    On a cluster a port of the first rank's node is used instead.
    """
    return f"file://{folder / secrets.token_hex(8)}"


@contextlib.contextmanager
def rendezvous_folder() -> Iterator[Path]:
    """A temporary folder with file locks, which the file system of the run folder may lack.

    In shared memory if available: TMPDIR may also be on a network file system.
    """
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="areal_like-ranks-", dir=place))
    claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
