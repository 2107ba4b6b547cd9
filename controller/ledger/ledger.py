"""The persistent record of a run: facts in SQLite (WAL, synchronous=NORMAL), tokens in segment files next to it.

One transaction per burst of effects. Decisions are made by the coordinator; the lock of the run folder is in
run_lock.py.

After kill -9 at any moment the ledger contains exactly the committed transactions: payload bytes are written to the
operating system before the rows that refer to them are committed, and bytes without a row are never read. `fsync=True`
extends this to power loss. Network file systems are not supported (SQLite's WAL).

The write-ahead log is copied into the database after every step's batch, every checkpoint and every new lineage, by a
thread (log_copier.py). The loss of `ledger.sqlite-wal` therefore loses at most the samples since the last step, and a
step only while the disk has not yet written it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from areal_like.durable import flush_to_disk
from areal_like.encryption.texts import Texts
from areal_like.errors import LedgerError, UserError
from areal_like.trajectory import Segment, Trajectory
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.wire.messages import BatchSample
from controller.coordinator.effects import (
    DropGroup,
    Effect,
    FilterGroup,
    RecordBatch,
    RecordCheckpoint,
    RecordIncident,
    RecordLineage,
    StoreFinished,
)
from controller.coordinator.snapshot import BatchGroup, BatchRecord, LedgerState
from controller.ledger.batch_reader import samples_of_batch
from controller.ledger.digests import ERASED, first_link
from controller.ledger.log_copier import LogCopier, copy_log
from controller.ledger.migrations import SCHEMA_VERSION, bring_up_to_date, newer_schema
from controller.ledger.run_lock import lock_folder
from controller.ledger.sample_lengths import LengthFact
from controller.ledger.schema import read_batches, read_group_fates, read_length_facts, read_row_outcomes, read_state
from controller.ledger.segment_store import (
    Location,
    SegmentStore,
    unpack_checkpoint,
    unpack_sample,
    unpack_segment,
)
from controller.ledger.trajectory_cache import TrajectoryCache
from controller.ledger.transaction import Burst, LedgerEntry

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
SEGMENT_FOLDER = "segments"
_VALUES = msgspec.msgpack.Decoder(tuple[float | None, ...])
REMEDY = "restore the run folder from a backup, or start a new run"
MILESTONES = (RecordBatch, RecordCheckpoint, RecordLineage)
"""Facts (milestones) after which the log is copied into the database file."""
LONG_LOG = 256
"""Transactions without a milestone after which the log is also copied, so that it stays small."""
CHECK = "PRAGMA integrity_check(1)"
"""Made when the ledger is opened. It also compares indexes with tables, which a disk that loses writes makes differ."""
CLOSE_WAIT_S = 1.0
"""Maximum wait for readers when the ledger is closed; after it the last reader removes the write-ahead log."""


class PurgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a purge."""

    num_samples: int
    num_files: int
    freed_bytes: int


class EraseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an erasure. num_samples: samples whose tokens were stored; num_bytes: overwritten bytes."""

    num_samples: int
    num_bytes: int


class Ledger:
    """The ledger of one writer, protected by a lock. Methods block; call them from one thread only."""

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str = "",
        must_exist: bool = False,
        segment_bytes: int = 32 << 20,
        cache_bytes: int = 64 << 20,
        keep_bytes: int | None = 0,
        fsync: bool = False,
    ) -> None:
        """Open or create <run_dir>/ledger.sqlite and <run_dir>/segments/.

        segment_bytes: a segment file is closed above this size. cache_bytes: payloads kept in memory until their group
        is used for training or ends otherwise. keep_bytes: bytes of the newest segment files that are kept although
        they are not needed any more (None: all). fsync: also survive power loss, not only kill -9.

        Raises UserError (open elsewhere, unwritable folder, missing although must_exist), LedgerError (damaged, or the
        disk fails or is full).
        """
        self._path = run_dir / LEDGER_FILE
        self._keep_bytes = keep_bytes
        self._num_uncopied = 0
        self._cache = TrajectoryCache(cache_bytes)
        if must_exist and not self._path.exists():
            raise UserError("the folder contains no ledger", where=str(run_dir), remedy="specify the folder of a run")
        self._lock = lock_folder(run_dir)
        try:
            self._db = _open(self._path, run_id, fsync)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            (run_dir / SEGMENT_FOLDER).mkdir(exist_ok=True)
            if fsync:
                flush_to_disk(run_dir)
            (used,) = self._db.execute("SELECT COALESCE(MAX(CAST(file AS INTEGER)), 0) FROM digests").fetchone()
            self._segments = SegmentStore(run_dir / SEGMENT_FOLDER, segment_bytes=segment_bytes, fsync=fsync, used=used)
            self._texts = Texts.to_write(run_dir)
            self._check_segments()
            (self._seq,) = self._db.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'seq'").fetchone()
            self._last_digest = _last_digest(self._db, self._path)
            copy_log(self._db, self._path, "PASSIVE")
            self._copier = LogCopier(self._path)
        except BaseException as error:
            self._db.close()
            os.close(self._lock)
            if isinstance(error, sqlite3.Error | OSError):
                raise _unreadable(self._path, error) from error
            raise

    # ------------------------------------------------------------ writing

    def apply(self, entries: Sequence[LedgerEntry]) -> None:
        """Write all entries in one transaction and commit.

        Args:
            entries: effects of the coordinator with their payloads, in order.

        Raises:
            LedgerError: the disk is full or the file damaged; then none of `entries` is stored.
        """
        if not entries:
            return
        burst = Burst(self._seq, self._segments, self._texts)
        try:
            for entry in entries:
                burst.add(entry)
            self._segments.flush()
            self._db.execute("BEGIN IMMEDIATE")
            last_digest = burst.write(self._db, self._last_digest)
            self._db.execute("COMMIT")
        except BaseException as error:
            self._segments.discard()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error | OSError):
                raise LedgerError(
                    f"{self._path} cannot be written ({error}); check whether the disk is full"
                ) from error
            raise
        self._seq, self._last_digest = burst.seq, last_digest
        self._num_uncopied += 1
        if self._num_uncopied >= LONG_LOG or any(isinstance(entry.effect, MILESTONES) for entry in entries):
            self._num_uncopied = 0
            self._copier.request()
        for entry in entries:
            match entry.effect:
                case StoreFinished(purpose="train", outcome=outcome):
                    self._cache.add(outcome.group_id, outcome.sample_index, entry.trajectories)
                case DropGroup(group_id=group_id) | FilterGroup(group_id=group_id):
                    self._cache.forget(group_id)

    def purge(self, covered_step: int) -> PurgeReport:
        """Delete the oldest segment files that are not needed any more, beyond `keep_bytes`.

        Payloads of live groups and of steps after `covered_step` are needed.

        Args:
            covered_step: the last step that every checkpoint the run may fall back to covers.

        Returns:
            What was deleted.
        """
        if self._keep_bytes is None:
            return PurgeReport(num_samples=0, num_files=0, freed_bytes=0)
        needed = {
            row[0]
            for row in self._db.execute(
                "SELECT DISTINCT file FROM samples JOIN groups USING (group_id) WHERE file IS NOT NULL "
                "AND (fate = 'live' OR (fate = 'consumed' AND step > ?)) UNION SELECT DISTINCT file FROM partials",
                (covered_step,),
            )
        }
        sizes = self._segments.sizes()
        idle = [number for number in sorted(sizes) if number not in needed and number != self._segments.writing]
        excess = sum(sizes[number] for number in idle) - self._keep_bytes
        doomed: list[int] = []
        for number in idle:
            if excess <= 0:
                break
            doomed.append(number)
            excess -= sizes[number]
        if not doomed:
            return PurgeReport(num_samples=0, num_files=0, freed_bytes=0)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            statement = "UPDATE samples SET file = NULL WHERE file = ?"
            num_samples = self._db.executemany(statement, [(number,) for number in doomed]).rowcount
            self._db.execute("COMMIT")
            freed = sum(self._segments.delete(number) for number in doomed)
        except (sqlite3.Error, OSError) as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise LedgerError(
                f"old tokens cannot be removed from {self._path} ({error}); check the disk and its free space"
            ) from error
        return PurgeReport(num_samples=num_samples, num_files=len(doomed), freed_bytes=freed)

    def erase(self, groups: Sequence[int]) -> EraseReport:
        """Erase the tokens and texts of groups: stored payloads, and bytes that no row refers to any more, are
        overwritten. A group that has not ended is dropped, with the reason `erased`. Facts and their digests remain. An
        incident of the kind `erased` lists the groups, so that `areal-like verify` expects no tokens of them.

        Raises:
            LedgerError: the disk is full, or the file is damaged.
        """
        doomed = set(groups)
        try:
            live = self._db.execute("SELECT group_id FROM groups WHERE fate = 'live'").fetchall()
            effects: list[Effect] = [DropGroup(group_id=one, reason=ERASED) for (one,) in live if one in doomed]
            effects += [RecordIncident(kind=ERASED, text=" ".join(map(str, groups)))] if groups else []
            self.apply([LedgerEntry(effect=effect) for effect in effects])
            self._db.execute("BEGIN IMMEDIATE")
            keys = [(group,) for group in groups]  # there may be more than the variables of one statement
            statement = "UPDATE samples SET file = NULL WHERE file IS NOT NULL AND group_id = ?"
            num_samples = max(0, self._db.executemany(statement, keys).rowcount)
            self._db.executemany("DELETE FROM partials WHERE group_id = ?", keys)
            self._db.execute("COMMIT")
            self._segments.discard()
            num_bytes = sum(self._segments.scrub(number, self._records_in(number)) for number in self._segments.sizes())
        except (sqlite3.Error, OSError) as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise LedgerError(
                f"tokens cannot be erased from {self._path} ({error}); check the disk and its free space"
            ) from error
        for group in groups:
            self._cache.forget(group)
        return EraseReport(num_samples=num_samples, num_bytes=num_bytes)

    def _records_in(self, number: int) -> list[tuple[int, int]]:
        """Offset and size of the records of a file that rows refer to."""
        return [
            row
            for table in ("samples", "partials")
            for row in self._db.execute(f"SELECT offset, size FROM {table} WHERE file = ?", (number,))
        ]

    # ------------------------------------------------------------ reading

    @property
    def seq(self) -> int:
        """Number of facts recorded so far."""
        return int(self._seq)

    @property
    def last_digest(self) -> bytes:
        """Digest of the newest fact, which covers all facts before (digests.py)."""
        return self._last_digest

    @property
    def run_id(self) -> str:
        """Id of the run that created the ledger."""
        (run_id,) = self._db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        return str(run_id)

    def lineages(self) -> dict[str, int]:
        """The starting version of each lineage, oldest lineage first."""
        return dict(self._db.execute("SELECT lineage, checkpoint_version FROM lineages ORDER BY seq"))

    def load(self) -> LedgerState:
        """Read the state from which the coordinator is restored.

        Returns:
            Groups, batches and counters as of the last commit.

        Raises:
            LedgerError: the ledger is damaged.
        """
        try:
            return read_state(self._db)
        except (sqlite3.Error, ValueError, KeyError) as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def batches_after(self, step: int) -> tuple[BatchRecord, ...]:
        """Read the recorded batches of later steps.

        Args:
            step: batches of later steps are returned.

        Returns:
            The batches, in order of their steps.

        Raises:
            LedgerError: the ledger is damaged.
        """
        try:
            return tuple(batch for batch in read_batches(self._db) if batch.step > step)
        except (sqlite3.Error, ValueError) as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def length_facts(self) -> tuple[LengthFact, ...]:
        """Lengths of the samples of all ended groups, by fate. Raises LedgerError (damaged)."""
        try:
            return read_length_facts(self._db)
        except sqlite3.Error as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def group_fates(self) -> list[tuple[str, int]]:
        """Fate and position in the draw order of each ended group. Raises LedgerError (damaged)."""
        try:
            return read_group_fates(self._db)
        except sqlite3.Error as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def row_outcomes(self, *, group_size: int) -> list[tuple[int, list[float], float]]:
        """For each group whose answers all have a verdict, in order of completion: its position in the draw order, the
        effective rewards, and the mean tokens of these answers. Raises LedgerError (damaged).
        """
        try:
            return read_row_outcomes(self._db, group_size=group_size, min_scored=min(2, group_size))
        except (sqlite3.Error, ValueError) as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def evaluations(self) -> dict[int, tuple[float | None, ...]]:
        """Values of the newest complete evaluation of each version, by eval row. Raises LedgerError (damaged)."""
        try:
            rows = self._db.execute('SELECT version, "values" FROM evals ORDER BY seq').fetchall()
            return {version: _VALUES.decode(blob) for version, blob in rows}
        except (sqlite3.Error, ValueError) as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def prefix(self, group_id: int, sample_index: int) -> Segment:
        """Read the stored tokens of an unfinished sample.

        Args:
            group_id: the group's number.
            sample_index: the sample's index in its group, from 0.

        Returns:
            The tokens; empty if there are none.

        Raises:
            LedgerError: the ledger is damaged.
        """
        rows = self._db.execute(
            "SELECT file, offset, size FROM partials WHERE group_id = ? AND sample_index = ? ORDER BY start",
            (group_id, sample_index),
        )
        whole = Segment.empty()
        try:
            for row in rows:
                whole = whole.joined(unpack_segment(self._segments.read(Location(*row))))
        except ValueError as error:
            raise LedgerError(
                f"{self._path}: the tokens of group {group_id} are damaged ({error}); {REMEDY}"
            ) from error
        return whole

    def turn_checkpoint(self, group_id: int, sample_index: int) -> TurnCheckpoint | None:
        """State at the end of the stored tokens of an unfinished episode of several turns; None for other samples.

        Raises LedgerError (damaged).
        """
        row = self._db.execute(
            "SELECT file, offset, size FROM partials WHERE group_id = ? AND sample_index = ? "
            "ORDER BY start DESC LIMIT 1",
            (group_id, sample_index),
        ).fetchone()
        try:
            return unpack_checkpoint(self._segments.read(Location(*row))) if row is not None else None
        except ValueError as error:
            raise LedgerError(f"{self._path}: the turns of group {group_id} are damaged ({error}); {REMEDY}") from error

    def trajectories(self, group_id: int, sample_index: int) -> tuple[Trajectory, ...]:
        """Read the tokens, log-probs and versions of a finished sample.

        Args:
            group_id: the group's number.
            sample_index: the sample's index in its group, from 0.

        Returns:
            The trajectories as the worker reported them, the main one first.

        Raises:
            LedgerError: it was purged or is damaged.
        """
        if (cached := self._cache.get(group_id, sample_index)) is not None:
            return cached
        row = self._db.execute(
            "SELECT file, offset, size FROM samples WHERE group_id = ? AND sample_index = ?", (group_id, sample_index)
        ).fetchone()
        if row is None or row[0] is None:
            fate = (
                "was never stored"
                if row is None
                else "was deleted, because the checkpoint in use is older than the oldest stored tokens"
            )
            raise LedgerError(f"{self._path}: sample {sample_index} of group {group_id} {fate}; {REMEDY}")
        try:
            return unpack_sample(self._segments.read(Location(*row)))[0]
        except ValueError as error:
            raise LedgerError(f"{self._path}: a sample of group {group_id} is damaged ({error}); {REMEDY}") from error

    def batch_samples(self, groups: Sequence[BatchGroup], reused: Sequence[BatchGroup] = ()) -> tuple[BatchSample, ...]:
        """Read payloads and rewards of a batch. Repeated reads are from disk.

        Args:
            groups: the batch's groups.
            reused: groups of earlier steps that it trains on as well.

        Returns:
            Its samples, ordered by (group_id, sample_index).

        Raises:
            LedgerError: a payload was purged or is damaged.
        """
        samples = samples_of_batch(groups, reused, self._rewards, self.trajectories)
        for group in (*groups, *reused):
            self._cache.forget(group.group_id)
        return samples

    def wait_for_copy(self, timeout_s: float) -> bool:
        """Wait until the database file contains everything committed before the last milestone.

        Args:
            timeout_s: the longest wait, in seconds.

        Returns:
            Whether it does.
        """
        return self._copier.wait(timeout_s)

    def close(self) -> None:
        """Close files and release the lock."""
        self._copier.close()
        self._segments.close()
        self._db.execute(f"PRAGMA busy_timeout = {int(CLOSE_WAIT_S * 1000)}")
        copy_log(self._db, self._path, "TRUNCATE")
        self._db.close()
        os.close(self._lock)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _rewards(self, group_id: int) -> dict[int, float]:
        return dict(self._db.execute("SELECT sample_index, value FROM samples WHERE group_id = ?", (group_id,)))

    def _check_segments(self) -> None:
        """Check that the bytes of every row exist (checksums are verified when they are read)."""
        sizes = self._segments.sizes()
        for table in ("partials", "samples"):
            ends = self._db.execute(
                f"SELECT file, MAX(offset + size) FROM {table} WHERE file IS NOT NULL GROUP BY file"
            ).fetchall()  # a statement that is not at its end keeps the database open
            for number, end in ends:
                if sizes.get(number, 0) < end:
                    raise LedgerError(f"{self._segments.path(number)} is missing or truncated; {REMEDY}")


def _open(path: Path, run_id: str, fsync: bool) -> sqlite3.Connection:
    """Open the database. Raises UserError (unwritable, newer schema) or LedgerError (damaged)."""
    db = None
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0, cached_statements=64)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # an automatic checkpoint would wait for the disk within a commit
        (verdict,) = db.execute(CHECK).fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        schema = bring_up_to_date(db, run_id)
    except (sqlite3.Error, ValueError) as error:
        if db is not None:
            db.close()
        if "readonly" in str(error) or "unable to open" in str(error):
            raise UserError(
                f"cannot write the ledger ({error})",
                where=str(path),
                remedy="check the permissions of this file and its folder",
            ) from error
        raise _unreadable(path, error) from error
    if schema > SCHEMA_VERSION:
        db.close()
        raise newer_schema(path, schema)
    if 0 < schema < SCHEMA_VERSION:
        log.info("%s was migrated from schema version %d to %d", path, schema, SCHEMA_VERSION)
    return db


def _unreadable(path: Path, error: Exception) -> LedgerError:
    """The error for a ledger that cannot be opened: the disk fails or is full, or the ledger is damaged."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended code
    if isinstance(error, OSError) or code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL):
        return LedgerError(f"{path} cannot be opened ({error}); check the disk and its free space")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LedgerError(f"{path} is locked by another program ({error}); end the program that has the file open")
    return LedgerError(f"{path} is damaged ({error}); {REMEDY}")


def _last_digest(db: sqlite3.Connection, path: Path) -> bytes:
    """Digest that the next fact follows. Raises LedgerError (damaged)."""
    meta = dict(db.execute("SELECT key, value FROM meta"))
    try:
        if meta["last_digest"]:
            return bytes.fromhex(meta["last_digest"])
        return first_link(meta["run_id"], int(meta["digests_since"]))
    except (KeyError, ValueError) as error:
        raise LedgerError(
            f"{path} is damaged (invalid metadata last_digest or digests_since: {error}); {REMEDY}"
        ) from error
