"""Where a run's ledger is written: in its run folder, or on the controller's own disk with a mirror in the run folder.

Owns: the local folder, copies into the run folder, which of the two a resume begins with. Refuses: what is in it.

On a cluster the run folder lies on a network file system, where SQLite's write-ahead log does not work. So the ledger
is written on a local disk and copied: a consistent snapshot of the facts first, then the bytes of tokens that they
name, so that no row of a mirror points at missing bytes. A mirror is as old as its last copy: what came after it is
lost with the controller's machine, and the run goes on from the newest checkpoint that the mirror covers. A checkpoint
is followed by a copy at once.

`ledger.home` in the run folder names the local folder that last wrote the run: another one, left by an earlier session
on another machine, is thrown away and made again from the mirror.
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
"""How late a saved checkpoint is followed by a copy."""
MAX_TRIES = 3
"""A purge of tokens between the two halves of a copy makes it begin again; purges are rare."""


class LedgerHome:
    """The local folder of one run's ledger and its mirror. Methods block on files: call them from a thread."""

    def __init__(self, run_dir: Path, local_dir: Path | None, run_id: str) -> None:
        """`local_dir`: folder on this machine for ledgers of runs; None: that for temporary files."""
        base = local_dir or Path(tempfile.gettempdir()) / f"areal-like-ledgers-{os.getuid()}"
        self.run_dir, self.folder, self._is_shared_place = run_dir, base / run_id, local_dir is None
        self.is_restored = False
        """The ledger was made from the mirror: what came after the last copy is not in it."""
        self._copying = threading.Lock()
        self._run_lock: int | None = None

    def open(self) -> Path:
        """The folder to write the ledger in: as it was left here, or as the mirror has it.

        Raises UserError: another controller has the run, the folder cannot be written.
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
                f"the ledger cannot be kept here ({error.strerror})",
                where=str(self.folder),
                remedy="launch.ray.local_dir: a folder on this machine that you may write to",
            ) from error
        return self.folder

    def copy(self) -> None:
        """Bring the mirror up to date. Raises LedgerError, OSError (disk full)."""
        if not (self.folder / LEDGER_FILE).exists():
            return
        with self._copying:
            for _ in range(MAX_TRIES):
                needed = self._copy_facts()
                if self._copy_segments(needed):
                    (self.run_dir / f"{LEDGER_FILE}.new").replace(self.run_dir / LEDGER_FILE)
                    self._drop_segments(needed)
                    return
        raise LedgerError(f"{self.folder}: tokens were purged repeatedly while the ledger was copied")

    async def keep_up(self, saved_version: Callable[[], int], every_s: float, say: Callable[[str], None]) -> None:
        """Copy every `every_s` seconds, and as soon as a checkpoint is saved. Until cancelled."""
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
        """The last copy; then nothing stays on this machine. Where the copy fails, all does, and it is said."""
        try:
            self.copy()
            (self.run_dir / HOME_FILE).unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        except (LedgerError, OSError) as error:
            log.error("the ledger remains in %s, the run folder has an older copy (%s)", self.folder, error)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let another controller have the run."""
        if self._run_lock is not None:
            os.close(self._run_lock)
            self._run_lock = None

    # ------------------------------------------------------------ inside

    def _check_base(self) -> None:
        """Raise UserError where another user made the folder of ledgers, among temporary files that all users share."""
        base = self.folder.parent
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise UserError(
                "belongs to another user, who could replace the ledger",
                where=str(base),
                remedy="launch.ray.local_dir: a folder on this machine that only you may write to",
            )
        base.chmod(0o700)  # an earlier version may have made it

    def _is_home(self) -> bool:
        try:
            recorded = json.loads((self.run_dir / HOME_FILE).read_text())
            return (self.folder / HOME_FILE).read_text() == recorded["token"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _refuse_to_forget(self) -> None:
        """Raise UserError where the folder here holds more than the mirror and nothing says that it is void."""
        if (self.run_dir / HOME_FILE).exists():
            return  # another machine, or a later session here, went on from the mirror
        here, mirrored = _num_facts(self.folder / LEDGER_FILE), _num_facts(self.run_dir / LEDGER_FILE)
        if here > mirrored:
            raise UserError(
                f"{HOME_FILE} is missing, and {self.folder} holds a newer ledger of this run ({here} facts) than the "
                f"run folder ({mirrored})",
                where=str(self.run_dir),
                remedy=f"restore {HOME_FILE}, or remove {self.folder} to continue from the run folder's copy",
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
        """A snapshot alongside the mirror's present one; the numbers of the segment files it names."""
        fresh = self.run_dir / f"{LEDGER_FILE}.new"
        fresh.unlink(missing_ok=True)
        try:
            with (
                contextlib.closing(sqlite3.connect(self.folder / LEDGER_FILE, timeout=10.0)) as source,
                contextlib.closing(sqlite3.connect(fresh)) as target,
            ):
                source.backup(target)
                target.execute("PRAGMA journal_mode = DELETE")  # the network file system knows no write-ahead log
                rows = "SELECT file FROM samples WHERE file IS NOT NULL UNION SELECT file FROM partials"
                return {row[0] for row in target.execute(rows)}
        except sqlite3.Error as error:
            raise LedgerError(f"{self.folder / LEDGER_FILE} cannot be copied to {self.run_dir} ({error})") from error

    def _copy_segments(self, needed: set[int]) -> bool:
        """Append what has grown; False where a file that the snapshot names is gone."""
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
    """Facts in a ledger that nobody writes; 0 where there is none or it cannot be read."""
    if not ledger.is_file():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(ledger, timeout=10.0)) as db:
            return int(db.execute("SELECT value FROM meta WHERE key = 'seq'").fetchone()[0])
    except (sqlite3.Error, TypeError, ValueError):
        return 0


def _append_rest(source: Path, target: Path) -> None:
    """Segment files only ever grow: copy what `target` lacks."""
    with source.open("rb") as reader, target.open("ab") as writer:
        have = writer.tell()
        if os.fstat(reader.fileno()).st_size > have:
            reader.seek(have)
            shutil.copyfileobj(reader, writer, 1 << 20)
