"""Tables of the ledger, and reading the state from which the coordinator is restored.

Writing is in ledger.py, payloads in segment_store.py.

`seq` numbers every recorded fact in order, so that invariants can be recounted later (audit.py). `cut_samples` are
samples that were unfinished when their group was dropped: their tokens are not stored, only their lengths
(sample_lengths.py). `digests` has the digest of each fact, by its number (digests.py).
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter

import msgspec

from controller.coordinator.snapshot import (
    BatchGroup,
    BatchRecord,
    CheckpointRecord,
    GroupRecord,
    LedgerState,
    SampleRecord,
)
from controller.ledger.sample_lengths import NUM_BLOCKS, LengthFact, cause_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lineages (
  seq INTEGER PRIMARY KEY, lineage TEXT NOT NULL UNIQUE, checkpoint_version INTEGER NOT NULL,
  groups_per_step INTEGER NOT NULL, group_size INTEGER NOT NULL, max_staleness INTEGER, on_stale TEXT NOT NULL,
  passes_per_batch INTEGER NOT NULL DEFAULT 1, least_groups INTEGER,
  replay_groups INTEGER, replay_max_age INTEGER, replay_max_reuses INTEGER);
CREATE TABLE IF NOT EXISTS groups (
  group_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, started INTEGER NOT NULL, seq INTEGER NOT NULL,
  fate TEXT NOT NULL DEFAULT 'live', reason TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '',
  step INTEGER, end_seq INTEGER, draw INTEGER);
CREATE INDEX IF NOT EXISTS live_groups ON groups (group_id) WHERE fate = 'live';
CREATE TABLE IF NOT EXISTS partials (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, start INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
  first_version INTEGER NOT NULL, last_version INTEGER NOT NULL,
  file INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY (group_id, sample_index, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cut_samples (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
  PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, seq INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
  first_version INTEGER NOT NULL, last_version INTEGER NOT NULL, verdict_kind TEXT NOT NULL, value REAL,
  is_kept INTEGER NOT NULL, worker TEXT NOT NULL, facts BLOB NOT NULL,
  file INTEGER, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS stored_samples ON samples (file) WHERE file IS NOT NULL;
CREATE TABLE IF NOT EXISTS batches (
  seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, lineage TEXT NOT NULL, is_replay INTEGER NOT NULL,
  groups BLOB NOT NULL, reused BLOB, UNIQUE (step, lineage));
CREATE TABLE IF NOT EXISTS checkpoints (
  seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, lineage TEXT NOT NULL, path TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trainer_restarts (
  seq INTEGER PRIMARY KEY, lineage TEXT NOT NULL UNIQUE, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evals (
  seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, lineage TEXT NOT NULL, kind TEXT NOT NULL, "values" BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS skipped_draws (
  draw INTEGER PRIMARY KEY, seq INTEGER NOT NULL, rate REAL NOT NULL, num_tokens REAL NOT NULL);
CREATE TABLE IF NOT EXISTS incidents (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS digests (
  seq INTEGER PRIMARY KEY, digest BLOB NOT NULL, content BLOB, file INTEGER);
"""

_BATCH_DECODER = msgspec.msgpack.Decoder(tuple[BatchGroup, ...])
_ENCODER = msgspec.msgpack.Encoder()


def encode_groups(groups: tuple[BatchGroup, ...]) -> bytes:
    """Encode the groups of a batch as one blob."""
    return _ENCODER.encode(groups)


def decode_groups(blob: bytes) -> tuple[BatchGroup, ...]:
    """Inverse of `encode_groups`. Raises ValueError if the blob is damaged."""
    return _BATCH_DECODER.decode(blob)


def read_state(db: sqlite3.Connection) -> LedgerState:
    """Read all data that the coordinator needs to continue. Raises sqlite3.Error or ValueError if the ledger is
    damaged.
    """
    (num_lineages,) = db.execute("SELECT COUNT(*) FROM lineages").fetchone()
    (num_restarts,) = db.execute("SELECT COUNT(*) FROM trainer_restarts").fetchone()
    (num_drawn,) = db.execute("SELECT COUNT(*) FROM groups").fetchone()
    (next_draw,) = db.execute("SELECT MAX(COALESCE(draw, group_id)) + 1 FROM groups").fetchone()
    (num_filtered,) = db.execute("SELECT COUNT(*) FROM groups WHERE fate = 'filtered'").fetchone()
    dropped = Counter(dict(db.execute("SELECT reason, COUNT(*) FROM groups WHERE fate = 'dropped' GROUP BY reason")))
    return LedgerState(
        num_lineages=num_lineages,
        num_trainer_restarts=num_restarts,
        num_drawn=num_drawn,
        next_draw=next_draw or 0,
        num_filtered=num_filtered,
        dropped=dict(sorted(dropped.items())),
        live=_live_groups(db),
        batches=read_batches(db),
        checkpoints=_checkpoints(db),
        stored=_stored_groups(db),
        evals=tuple(row[0] for row in db.execute("SELECT DISTINCT version FROM evals ORDER BY version")),
    )


def _stored_groups(db: sqlite3.Connection) -> frozenset[int]:
    """Consumed groups whose kept samples all have their tokens."""
    rows = db.execute(
        "SELECT group_id FROM samples JOIN groups USING (group_id) WHERE fate = 'consumed' AND is_kept "
        "GROUP BY group_id HAVING COUNT(*) = COUNT(file)"
    )
    return frozenset(group_id for (group_id,) in rows)


def has_column(db: sqlite3.Connection, table: str, column: str) -> bool:
    """Return whether a table has the column; a ledger of an older schema may lack it or the table."""
    return column in {row[1] for row in db.execute(f"PRAGMA table_info({table})")}


def read_batches(db: sqlite3.Connection) -> tuple[BatchRecord, ...]:
    """Read the newest record of every step, in order of steps."""
    newest: dict[int, BatchRecord] = {}
    # Read without migration, an old ledger lacks the column.
    reused_column = "reused" if has_column(db, "batches", "reused") else "NULL"
    query = f"SELECT step, lineage, groups, {reused_column} FROM batches ORDER BY seq"
    for step, lineage, blob, reused in db.execute(query):
        newest[step] = BatchRecord(
            step=step,
            lineage=lineage,
            groups=decode_groups(blob),
            reused=() if reused is None else decode_groups(reused),
        )
    return tuple(newest[step] for step in sorted(newest))


def read_length_facts(db: sqlite3.Connection) -> tuple[LengthFact, ...]:
    """Lengths of the samples of ended groups, by fate; unfinished samples with their tokens so far."""
    counts: Counter[tuple[str, int, int, bool]] = Counter()
    for table, is_kept, is_finished in (("samples", "is_kept", True), ("cut_samples", "0", False)):
        rows = db.execute(
            f"SELECT fate, reason, {is_kept}, group_id % {NUM_BLOCKS}, num_tokens, COUNT(*) "
            f"FROM {table} JOIN groups USING (group_id) WHERE fate != 'live' GROUP BY 1, 2, 3, 4, 5"
        )
        for fate, reason, kept, block, num_tokens, count in rows:
            counts[cause_of(fate, reason, bool(kept)), block, num_tokens, is_finished] += count
    return tuple(
        LengthFact(cause=cause, block=block, num_tokens=num_tokens, is_finished=is_finished, count=count)
        for (cause, block, num_tokens, is_finished), count in counts.items()
    )


def read_group_fates(db: sqlite3.Connection) -> list[tuple[str, int]]:
    """Fate and position in the draw order of each ended group."""
    return db.execute("SELECT fate, COALESCE(draw, group_id) FROM groups WHERE fate != 'live'").fetchall()


def read_row_outcomes(
    db: sqlite3.Connection, *, group_size: int, min_scored: int
) -> list[tuple[int, list[float], float]]:
    """Position in the draw order, effective rewards, and mean tokens of each group whose samples are all finished, in
    order of completion.
    """
    rows = db.execute(
        "SELECT group_id, COALESCE(draw, group_id), samples.seq, is_kept, value, num_tokens "
        "FROM samples JOIN groups USING (group_id) ORDER BY group_id, sample_index"
    )
    found: list[tuple[int, int, list[float], float]] = []
    for _, members in itertools.groupby(rows, key=lambda row: row[0]):
        samples = list(members)
        kept = [(value, num_tokens) for _, _, _, is_kept, value, num_tokens in samples if is_kept]
        if len(samples) == group_size and len(kept) >= min_scored:
            mean_tokens = sum(num_tokens for _, num_tokens in kept) / len(kept)
            found.append((max(row[2] for row in samples), samples[0][1], [value for value, _ in kept], mean_tokens))
    return [(draw, rewards, mean_tokens) for _, draw, rewards, mean_tokens in sorted(found)]


def _checkpoints(db: sqlite3.Connection) -> tuple[CheckpointRecord, ...]:
    """Checkpoints of the surviving lineage in order: a restart from version k invalidates the later ones."""
    facts = db.execute(
        "SELECT seq, version, lineage, path FROM checkpoints "
        "UNION ALL SELECT seq, checkpoint_version, lineage, NULL FROM lineages ORDER BY 1"
    )
    surviving: list[CheckpointRecord] = []
    for _, version, lineage, path in facts:
        if path is None:
            surviving = [checkpoint for checkpoint in surviving if checkpoint.version <= version]
        else:
            surviving.append(CheckpointRecord(version=version, lineage=lineage, path=path))
    return tuple(surviving)


def _live_groups(db: sqlite3.Connection) -> tuple[GroupRecord, ...]:
    rows = "SELECT group_id, version, COALESCE(draw, group_id) FROM groups WHERE fate = 'live' ORDER BY group_id"
    live = {group_id: (version, draw) for group_id, version, draw in db.execute(rows)}
    samples: dict[int, dict[int, SampleRecord]] = {group_id: {} for group_id in live}
    parts = db.execute(
        "SELECT group_id, sample_index, num_tokens, first_version, last_version FROM partials "
        "ORDER BY group_id, sample_index, start"
    )
    for group_id, index, num_tokens, first, last in parts:
        before = samples[group_id].get(index)
        samples[group_id][index] = SampleRecord(
            sample_index=index,
            num_tokens=num_tokens + (before.num_tokens if before else 0),
            first_version=before.first_version if before else first,
            last_version=last,
        )
    finished = db.execute(
        "SELECT group_id, sample_index, num_tokens, first_version, last_version, is_kept, value "
        "FROM groups JOIN samples USING (group_id) WHERE fate = 'live'"
    )
    for group_id, index, num_tokens, first, last, is_kept, value in finished:
        samples[group_id][index] = SampleRecord(
            sample_index=index,
            num_tokens=num_tokens,
            first_version=first,
            last_version=last,
            is_finished=True,
            is_kept=bool(is_kept),
            value=value,
        )
    return tuple(
        GroupRecord(
            group_id=group_id,
            version=version,
            samples=tuple(samples[group_id][i] for i in sorted(samples[group_id])),
            draw=draw,
        )
        for group_id, (version, draw) in live.items()
    )
