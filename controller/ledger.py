"""The run's memory on disk: facts in SQLite (WAL, synchronous=NORMAL), tokens in segment files beside it.

Owns: opening and locking, one transaction per burst of effects, payloads by sample, retention.
Refuses: deciding anything (the coordinator's), reading another run's file while it is written (the lock).

After kill -9 at any moment the ledger holds exactly the committed transactions: payload bytes are handed to the
operating system before the rows that name them are committed, and bytes without a row are never read. `fsync=True`
extends this to power loss. Not for network file systems (SQLite's WAL).
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from areal_like.errors import LedgerError, UserError
from areal_like.messages import BatchSample
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from controller import protocol as p
from controller.ledger_schema import SCHEMA, SCHEMA_VERSION, encode_groups, read_state
from controller.segments import (
    Location,
    SegmentStore,
    pack_segment,
    pack_trajectory,
    unpack_segment,
    unpack_trajectory,
)

LEDGER_FILE = "ledger.sqlite"
SEGMENT_FOLDER = "segments"
REMEDY = "restore the run folder from a copy, or start a new run"


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger effect with the payload it refers to.

    StorePartial needs `segment` (as reported: the ledger applies `skip`); StoreFinished of purpose "train" needs
    `trajectory`, and takes verdict, response_text, timings and worker for later browsing.
    """

    effect: p.Effect
    segment: Segment | None = None
    trajectory: Trajectory | None = None
    verdict: Verdict | None = None
    response_text: str = ""
    timings: dict[str, float] = {}
    worker: str = ""


class PurgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a purge removed."""

    num_samples: int
    num_files: int
    freed_bytes: int


class Ledger:
    """One writer, guarded by a lock. Blocking calls: from the shell's loop or from one dedicated thread, never two."""

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

        segment_bytes: a segment file is closed past this size. cache_bytes: recently written payloads kept in memory.
        keep_bytes: segment files no longer needed that stay nevertheless, newest ones, in bytes (None: all stay).
        fsync: survive power loss too, not only kill -9.
        Raises UserError (open elsewhere, unwritable folder, missing although must_exist), LedgerError (damaged).
        """
        self._path = run_dir / LEDGER_FILE
        self._keep_bytes, self._cache_bytes = keep_bytes, cache_bytes
        self._cache: OrderedDict[tuple[int, int], Trajectory] = OrderedDict()
        self._cached_bytes = 0
        if must_exist and not self._path.exists():
            raise UserError("there is no ledger here", where=str(run_dir), remedy="give the folder of a run")
        self._lock = _lock(run_dir)
        try:
            self._db = _open(self._path, run_id, fsync)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._segments = SegmentStore(run_dir / SEGMENT_FOLDER, segment_bytes=segment_bytes, fsync=fsync)
            self._check_segments()
            (self._seq,) = self._db.execute("SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'seq'").fetchone()
        except BaseException:
            self._db.close()
            os.close(self._lock)
            raise

    # ------------------------------------------------------------ writing

    def apply(self, entries: Sequence[LedgerEntry]) -> None:
        """Write all entries in one transaction and commit. Raises LedgerError (disk full): nothing is kept then."""
        if not entries:
            return
        burst = _Burst(self._seq, self._segments)
        try:
            for entry in entries:
                burst.add(entry)
            self._segments.flush()
            self._db.execute("BEGIN IMMEDIATE")
            burst.write(self._db)
            self._db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self._segments.discard()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise LedgerError(f"{self._path}: cannot write ({error}); is the disk full?") from error
        self._seq = burst.seq
        for entry in entries:
            if isinstance(entry.effect, p.StoreFinished) and entry.trajectory is not None:
                self._remember((entry.effect.group_id, entry.effect.sample_index), entry.trajectory)

    def purge(self, covered_step: int) -> PurgeReport:
        """Delete the oldest segment files that nothing needs any more, beyond `keep_bytes`.

        Needed are payloads of live groups and of steps after `covered_step` (the last step that every checkpoint the
        run may fall back to covers).
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
        self._db.execute("BEGIN IMMEDIATE")
        cursor = self._db.executemany("UPDATE samples SET file = NULL WHERE file = ?", [(number,) for number in doomed])
        self._db.execute("COMMIT")
        freed = sum(self._segments.delete(number) for number in doomed)
        return PurgeReport(num_samples=max(0, cursor.rowcount), num_files=len(doomed), freed_bytes=freed)

    # ------------------------------------------------------------ reading

    def load(self) -> p.LedgerState:
        """What the coordinator restores from. Raises LedgerError where the ledger is damaged."""
        try:
            return read_state(self._db)
        except (sqlite3.Error, ValueError, KeyError) as error:
            raise LedgerError(f"{self._path} is damaged ({error}); {REMEDY}") from error

    def prefix(self, group_id: int, sample_index: int) -> Segment:
        """The stored tokens of an unfinished sample, empty where there are none. Raises LedgerError (damaged)."""
        rows = self._db.execute(
            "SELECT file, offset, size FROM partials WHERE group_id = ? AND sample_index = ? ORDER BY start",
            (group_id, sample_index),
        )
        whole = Segment.empty()
        try:
            for row in rows:
                whole = whole.joined(unpack_segment(self._segments.read(Location(*row))))
        except ValueError as error:
            raise LedgerError(f"{self._path}: tokens of group {group_id} are damaged ({error}); {REMEDY}") from error
        return whole

    def trajectory(self, group_id: int, sample_index: int) -> Trajectory:
        """The payload of a finished sample. Raises LedgerError where it was purged or is damaged."""
        if (cached := self._cache.get((group_id, sample_index))) is not None:
            return cached
        row = self._db.execute(
            "SELECT file, offset, size FROM samples WHERE group_id = ? AND sample_index = ?", (group_id, sample_index)
        ).fetchone()
        if row is None or row[0] is None:
            fate = "was never stored" if row is None else "is purged, an older checkpoint than retention covers is used"
            raise LedgerError(f"{self._path}: sample {sample_index} of group {group_id} {fate}; {REMEDY}")
        try:
            return unpack_trajectory(self._segments.read(Location(*row)))[0]
        except ValueError as error:
            raise LedgerError(f"{self._path}: sample of group {group_id} is damaged ({error}); {REMEDY}") from error

    def batch_samples(self, groups: Sequence[p.BatchGroup]) -> tuple[BatchSample, ...]:
        """Payloads and rewards of a batch, ordered by (group_id, sample_index)."""
        samples: list[BatchSample] = []
        for group in sorted(groups, key=lambda group: group.group_id):
            rewards = dict(
                self._db.execute("SELECT sample_index, value FROM samples WHERE group_id = ?", (group.group_id,))
            )
            for index in sorted(group.sample_indices):
                samples.append(
                    BatchSample(
                        group_id=group.group_id,
                        sample_index=index,
                        trajectory=self.trajectory(group.group_id, index),
                        reward=rewards[index],
                    )
                )
        return tuple(samples)

    def close(self) -> None:
        """Close files and release the lock."""
        self._segments.close()
        self._db.close()
        os.close(self._lock)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _check_segments(self) -> None:
        """Every row's bytes must exist (their checksums are checked when they are read)."""
        sizes = self._segments.sizes()
        for table in ("partials", "samples"):
            ends = self._db.execute(
                f"SELECT file, MAX(offset + size) FROM {table} WHERE file IS NOT NULL GROUP BY file"
            )
            for number, end in ends:
                if sizes.get(number, 0) < end:
                    raise LedgerError(f"{self._segments.path(number)} is missing or cut short; {REMEDY}")

    def _remember(self, key: tuple[int, int], trajectory: Trajectory) -> None:
        self._cache[key] = trajectory
        self._cached_bytes += _size(trajectory)
        while self._cached_bytes > self._cache_bytes and self._cache:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


class _Burst:
    """The rows of one transaction, collected so that each statement runs once."""

    def __init__(self, seq: int, segments: SegmentStore) -> None:
        self.seq = seq
        self._segments = segments
        self._rows: dict[str, list[tuple[Any, ...]]] = {statement: [] for statement in _STATEMENTS}

    def add(self, entry: LedgerEntry) -> None:
        self.seq += 1
        effect = entry.effect
        match effect:
            case p.StorePartial():
                self._add_partial(effect, entry)
            case p.StoreFinished():
                if effect.purpose == "train":
                    self._add_finished(effect, entry)
            case p.RecordGroup():
                self._put("group", effect.group_id, effect.version, effect.started, self.seq)
            case p.DropGroup():
                self._put("end", "dropped", effect.reason, effect.detail, self.seq, effect.group_id)
                self._put("forget_group", effect.group_id)
            case p.FilterGroup():
                self._put("end", "filtered", "", f"{effect.value:g}", self.seq, effect.group_id)
            case p.RecordBatch():
                blob = encode_groups(effect.groups)
                self._put("batch", self.seq, effect.step, effect.lineage, effect.is_replay, blob)
                if not effect.is_replay:
                    for group in effect.groups:
                        self._put("consume", effect.step, self.seq, group.group_id)
            case p.RecordCheckpoint():
                self._put("checkpoint", self.seq, effect.version, effect.lineage, effect.path)
            case p.RecordEval():
                blob = msgspec.msgpack.encode(effect.values)
                self._put("eval", self.seq, effect.version, effect.lineage, effect.kind, blob)
            case p.RecordLineage():
                self._put("lineage", self.seq, *msgspec.structs.astuple(effect))
            case _:
                raise AssertionError(f"not a ledger effect: {effect!r}")

    def _put(self, statement: str, *row: Any) -> None:
        self._rows[statement].append(row)

    def _add_partial(self, effect: p.StorePartial, entry: LedgerEntry) -> None:
        assert entry.segment is not None, "StorePartial needs its segment"
        segment = entry.segment.tail(effect.skip) if effect.skip else entry.segment
        assert len(segment) == effect.num_tokens
        place = self._segments.append(pack_segment(segment))
        first, last = segment.first_version, segment.last_version
        self._put("partial", effect.group_id, effect.sample_index, effect.start, effect.num_tokens, first, last, *place)

    def _add_finished(self, effect: p.StoreFinished, entry: LedgerEntry) -> None:
        assert entry.trajectory is not None, "StoreFinished needs its trajectory"
        place = self._segments.append(pack_trajectory(entry.trajectory, entry.response_text))
        verdict = entry.verdict
        facts = {
            "components": verdict.components if verdict else {},
            "reason": verdict.reason if verdict else "",
            "timings": entry.timings,
            "finish_reason": entry.trajectory.finish_reason,
        }
        self._put(
            "finished",
            effect.group_id, effect.sample_index, self.seq, effect.num_tokens, effect.first_version,
            effect.last_version, effect.verdict_kind, effect.value, effect.is_kept, entry.worker,
            msgspec.json.encode(facts), *place,
        )  # fmt: skip
        self._put("forget_partial", effect.group_id, effect.sample_index)

    def write(self, db: sqlite3.Connection) -> None:
        for statement, rows in self._rows.items():
            if rows:
                db.executemany(_STATEMENTS[statement], rows)
        db.execute("UPDATE meta SET value = ? WHERE key = 'seq'", (str(self.seq),))


_STATEMENTS = {
    "lineage": "INSERT INTO lineages VALUES (?, ?, ?, ?, ?, ?, ?)",
    "group": "INSERT INTO groups (group_id, version, started, seq) VALUES (?, ?, ?, ?)",
    "partial": "INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "finished": "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "forget_partial": "DELETE FROM partials WHERE group_id = ? AND sample_index = ?",
    "end": "UPDATE groups SET fate = ?, reason = ?, detail = ?, end_seq = ? WHERE group_id = ?",
    "forget_group": "DELETE FROM partials WHERE group_id = ?",
    "batch": "INSERT INTO batches VALUES (?, ?, ?, ?, ?)",
    "consume": "UPDATE groups SET fate = 'consumed', step = ?, end_seq = ? WHERE group_id = ?",
    "checkpoint": "INSERT INTO checkpoints VALUES (?, ?, ?, ?)",
    "eval": "INSERT INTO evals VALUES (?, ?, ?, ?, ?)",
}
"""In the order they run: a group exists before it ends, a partial before it is superseded."""


def _size(trajectory: Trajectory) -> int:
    arrays: Iterable[Any] = (
        trajectory.tokens_T, trajectory.loss_mask_T, trajectory.logprobs_T, trajectory.versions_T,
    )  # fmt: skip
    return sum(array.nbytes for array in arrays)


def _lock(run_dir: Path) -> int:
    """The run's lock, held until closed or until the process dies."""
    path = run_dir / "ledger.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"cannot write here ({error.strerror})", where=str(run_dir), remedy="choose a folder you may write to"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise UserError(
            f"another controller (process {holder or 'unknown'}) has this run open",
            where=str(run_dir),
            remedy="wait for it to end, or stop it",
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _open(path: Path, run_id: str, fsync: bool) -> sqlite3.Connection:
    """Raises UserError (unwritable, newer schema) or LedgerError (damaged)."""
    db = None
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0, cached_statements=64)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        db.executescript(SCHEMA)
        facts = [("schema", str(SCHEMA_VERSION)), ("run_id", run_id), ("seq", "0")]
        db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", facts)
        (schema,) = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        if "readonly" in str(error) or "unable to open" in str(error):
            raise UserError(
                f"cannot write the ledger ({error})", where=str(path), remedy="check permissions"
            ) from error
        raise LedgerError(f"{path} is damaged ({error}); {REMEDY}") from error
    if schema != str(SCHEMA_VERSION):
        db.close()
        raise UserError(f"the ledger has schema {schema}", where=str(path), remedy="use the version that wrote it")
    return db
