"""Folders that a session needs besides the run folder: the ledger's, the weight store's, the one where ranks meet.

Owns: where each lies, the ledger's lock, giving them back at the end (through the session's exit stack). Refuses: what
is written there.
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
"""Shared memory asked for at least, also where the model's size is not known yet."""


def open_ledger_home(
    config: RunConfig, folder: RunFolder, run_id: str, stack: contextlib.ExitStack
) -> LedgerHome | None:
    """Where the ledger is written when it is not in the run folder; it is mirrored there, at last when all ends."""
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
    """The ledger, and with it the lock that makes the folder ours. Raises UserError when another has it.

    A run that was stopped during its preparation has an empty one; one that has made progress cannot have none.
    """
    root = home.folder if home else folder.root
    if is_resume:
        refuse_absent_ledger(folder, root / LEDGER_FILE, accept_loss=accept_loss)
    return Ledger(
        root,
        run_id=run_id,
        segment_bytes=int(config.ledger.segment_mb * 2**20),
        keep_bytes=None if config.ledger.keep_mb is None else int(config.ledger.keep_mb * 2**20),
    )


@contextlib.asynccontextmanager
async def mirrored(session: OpenSession, saved_version: Callable[[], int]) -> AsyncIterator[None]:
    """Keep the run folder's copy of the ledger up to date meanwhile, where it is one."""
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
    """The weight store's folder, in shared memory where all the versions it holds at once have room."""
    config, run_dir, stack = session.config, session.folder.root, session.stack
    weights = config.trainer.weights
    need_bytes = max(MIN_STORE_BYTES, weight_bytes(model_dir) * (weights.keep + 1))
    disk_dir = Path(weights.shared_dir) / session.run_id if weights.shared_dir else run_dir
    is_one_machine = launcher_of(config).is_one_machine
    place = weights.place if is_one_machine else "disk"  # each node has its own memory
    folder = default_root(session.run_id, place, disk_dir, need_bytes)
    if place == "shm" and folder.is_relative_to(run_dir):
        session.note(f"no room in shared memory: weights are transferred through {folder}", "warning")
    with contextlib.suppress(OSError):  # without it the next run removes what a killed one has left
        stack.callback(reaper.start())
    stack.callback(sweep_dead)  # what workers that were killed had put together
    stack.callback(WeightStore(folder, weights.layout, keep=2).close, remove=True)
    return folder


def sweep_dead_folders() -> None:
    """Remove what controllers and workers that were killed have left."""
    sweep_dead()
    sweep_dead(Path(tempfile.gettempdir()))  # rendezvous folders where there is no shared memory


def rendezvous_address(folder: Path) -> str:
    """Where the trainer's ranks find each other: a file that only this user can open; another one each time they start.

    On a cluster the first one's seat finds a port of its own node instead.
    """
    return f"file://{folder / secrets.token_hex(8)}"


@contextlib.contextmanager
def rendezvous_folder() -> Iterator[Path]:
    """A temporary folder with file locks, which the file system of the run folder may lack.

    In shared memory where there is any: TMPDIR may be on a network file system too.
    """
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="areal_like-ranks-", dir=place))
    claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
