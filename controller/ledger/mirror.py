"""Location of a run's ledger: in its run folder, or on the controller's own disk with a mirror in the run folder.

Manages the local folder, copies it into the run folder, and decides which of the two a resumed run uses.

On a cluster the run folder is on a network file system, where SQLite's write-ahead log does not work. The ledger is
therefore written on a local disk and copied: first a consistent snapshot of the facts, then the bytes of tokens that
they refer to, so that no row of a mirror refers to missing bytes. Facts recorded after the last copy are lost if the
controller's machine is lost, and the run continues from the newest checkpoint that the mirror covers. A copy is made
immediately after each checkpoint.

`ledger.home` in the run folder names the local folder that last wrote the run. Another folder, left by an earlier
session on another machine, is deleted and restored from the mirror.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from areal_like.errors import LedgerError, UserError
from controller.ledger.ledger import LEDGER_FILE, SEGMENT_FOLDER
from controller.ledger.run_lock import lock_folder

log = logging.getLogger(__name__)

HOME_FILE = "ledger.home"
LOOK_S = 1.0
"""Maximum delay between a saved checkpoint and the copy."""
MAX_TRIES = 3
"""Maximum attempts of a copy: a purge of tokens between its two halves restarts it; purges are rare."""


class LedgerHome:
    """The local folder of one run's ledger and its mirror. Methods block on files: call them from a thread."""

    def __init__(self, run_dir: Path, local_dir: Path | None, run_id: str) -> None:
        """`local_dir`: folder on this machine for ledgers of runs; None: in the folder for temporary files."""
        base = local_dir or Path(tempfile.gettempdir()) / f"areal-like-ledgers-{os.getuid()}"
        self.run_dir, self.folder, self._is_shared_place = run_dir, base / run_id, local_dir is None
        self.is_restored = False
        """The ledger was restored from the mirror: facts after the last copy are missing."""
        self._copying = threading.Lock()
        self._run_lock: int | None = None

    def open(self) -> Path:
        """Return the folder to write the ledger in: the existing one on this machine, or restored from the mirror.

        Raises UserError if another controller has the run, or the folder cannot be written.
        """
        self._run_lock = lock_folder(self.run_dir)
        try:
            if self._is_shared_place:
                self._check_base()
            if not self._is_home():
                self._refuse_to_forget()
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(mode=0o700, parents=True)
                self._bring_back()
                self._settle()
        except UserError:
            self.unlock()
            raise
        except OSError as error:
            self.unlock()
            raise UserError(
                f"the ledger cannot be stored in this folder ({error.strerror})",
                where=str(self.folder),
                remedy="set launch.ray.local_dir to a writable folder on this machine",
            ) from error
        return self.folder

    def copy(self) -> None:
        """Update the mirror. Raises LedgerError, OSError (disk full)."""
        if not (self.folder / LEDGER_FILE).exists():
            return
        with self._copying:
            for _ in range(MAX_TRIES):
                needed = self._copy_facts()
                if self._copy_segments(needed):
                    (self.run_dir / f"{LEDGER_FILE}.new").replace(self.run_dir / LEDGER_FILE)
                    self._drop_segments(needed)
                    return
        raise LedgerError(
            f"the ledger in {self.folder} could not be copied: in each of {MAX_TRIES} attempts, the run deleted "
            "sampled tokens during the copy"
        )

    async def keep_up(self, saved_version: Callable[[], int], every_s: float, say: Callable[[str], None]) -> None:
        """Copy every `every_s` seconds, and as soon as a checkpoint is saved, until cancelled."""
        copied_s, covered = time.monotonic(), saved_version()
        while True:
            await asyncio.sleep(LOOK_S)
            if saved_version() == covered and time.monotonic() - copied_s < every_s:
                continue
            covered, copied_s = saved_version(), time.monotonic()
            try:
                await asyncio.to_thread(self.copy)
            except (LedgerError, OSError) as error:
                say(f"the ledger's copy in the run folder is out of date: {error}")

    def close(self) -> None:
        """Make the last copy, then delete the local folder. If the copy fails, the folder is kept and an error is
        logged.
        """
        try:
            self.copy()
            (self.run_dir / HOME_FILE).unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        except (LedgerError, OSError) as error:
            log.error("the ledger is stored in %s; the run folder contains only an older copy (%s)", self.folder, error)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Release the lock of the run."""
        if self._run_lock is not None:
            os.close(self._run_lock)
            self._run_lock = None

    # ------------------------------------------------------------ inside

    def _check_base(self) -> None:
        """Raise UserError if another user created the folder of ledgers in the shared folder for temporary files."""
        base = self.folder.parent
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise UserError(
                "this path is not a folder that belongs to you, so another user could replace the ledger",
                where=str(base),
                remedy="set launch.ray.local_dir to a folder on this machine that only you can write to",
            )
        base.chmod(0o700)  # an earlier version may have created it

    def _is_home(self) -> bool:
        try:
            recorded = json.loads((self.run_dir / HOME_FILE).read_text())
            return (self.folder / HOME_FILE).read_text() == recorded["token"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _refuse_to_forget(self) -> None:
        """Raise UserError if the local folder contains more facts than the mirror and is not known to be outdated."""
        if (self.run_dir / HOME_FILE).exists():
            return  # another machine, or a later session on this one, continued from the mirror
        here, mirrored = _num_facts(self.folder / LEDGER_FILE), _num_facts(self.run_dir / LEDGER_FILE)
        if here > mirrored:
            raise UserError(
                f"{HOME_FILE} is missing, and the ledger of this run in {self.folder} is newer ({here} records) than "
                f"the one in the run folder ({mirrored} records)",
                where=str(self.run_dir),
                remedy=f"restore {HOME_FILE}, or remove {self.folder} to continue with the copy in the run folder",
            )

    def _settle(self) -> None:
        token = secrets.token_hex(8)
        (self.folder / HOME_FILE).write_text(token)
        fresh = self.run_dir / f"{HOME_FILE}.new"
        fresh.write_text(json.dumps({"folder": str(self.folder), "host": os.uname().nodename, "token": token}))
        fresh.replace(self.run_dir / HOME_FILE)

    def _bring_back(self) -> None:
        mirror = self.run_dir / LEDGER_FILE
        if mirror.exists():
            shutil.copy2(mirror, self.folder / LEDGER_FILE)
            self.is_restored = True
        if (self.run_dir / SEGMENT_FOLDER).is_dir():
            shutil.copytree(self.run_dir / SEGMENT_FOLDER, self.folder / SEGMENT_FOLDER)

    def _copy_facts(self) -> set[int]:
        """Write a snapshot next to the mirror's present one; return the numbers of the segment files it refers to."""
        fresh = self.run_dir / f"{LEDGER_FILE}.new"
        fresh.unlink(missing_ok=True)
        try:
            with (
                contextlib.closing(sqlite3.connect(self.folder / LEDGER_FILE, timeout=10.0)) as source,
                contextlib.closing(sqlite3.connect(fresh)) as target,
            ):
                source.backup(target)
                # a write-ahead log does not work on a network file system
                target.execute("PRAGMA journal_mode = DELETE")
                rows = "SELECT file FROM samples WHERE file IS NOT NULL UNION SELECT file FROM partials"
                return {row[0] for row in target.execute(rows)}
        except sqlite3.Error as error:
            raise LedgerError(f"{self.folder / LEDGER_FILE} cannot be copied to {self.run_dir} ({error})") from error

    def _copy_segments(self, needed: set[int]) -> bool:
        """Append new bytes of segment files; False if a file that the snapshot refers to was deleted."""
        target = self.run_dir / SEGMENT_FOLDER
        target.mkdir(exist_ok=True)
        for name in (f"{number:06d}.seg" for number in sorted(needed)):
            try:
                _append_rest(self.folder / SEGMENT_FOLDER / name, target / name)
            except FileNotFoundError:
                return False
        return True

    def _drop_segments(self, needed: set[int]) -> None:
        for file in (self.run_dir / SEGMENT_FOLDER).glob("*.seg"):
            if int(file.stem) not in needed:
                file.unlink(missing_ok=True)


def _num_facts(ledger: Path) -> int:
    """Number of facts in a ledger without a writer; 0 if there is none or it cannot be read."""
    if not ledger.is_file():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(ledger, timeout=10.0)) as db:
            return int(db.execute("SELECT value FROM meta WHERE key = 'seq'").fetchone()[0])
    except (sqlite3.Error, TypeError, ValueError):
        return 0


def _append_rest(source: Path, target: Path) -> None:
    """Copy the bytes that `target` lacks; segment files only grow."""
    with source.open("rb") as reader, target.open("ab") as writer:
        have = writer.tell()
        if os.fstat(reader.fileno()).st_size > have:
            reader.seek(have)
            shutil.copyfileobj(reader, writer, 1 << 20)
