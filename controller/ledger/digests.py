"""Digests of recorded facts: each covers its fact and the digest of the fact before, so that nothing recorded can be
changed, removed or moved without a difference.

Defines which columns make up a fact and how digests are computed. They are written with each transaction
(transaction.py) and recomputed by `areal-like verify` (controller/runs/verify/chain.py).

SHA-256, as in the manifests of checkpoints, so that any program can recompute them. A fact is encoded as msgpack of its
kind, its number and its columns as SQLite returns them, without NULLs at the end: a column that a later schema adds
does not change the digests of older facts.

Next to the digest of a fact stands the digest of its content: of a sample, the stored payload; of a batch, its policy
digest; of a checkpoint, the checkpoint's manifest. For a sample also the file that its payload was stored in: purging
removes it from the sample's row. Digests remain when payloads are purged.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from areal_like.errors import LedgerError
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.schema import decode_groups, has_column

FactKind = Literal["lineage", "skips", "admission", "sample", "end", "batch", "checkpoint", "evaluation", "incident"]

ERASED: Literal["erased"] = "erased"
"""Kind of an incident whose text is the numbers of the groups whose tokens were erased on request, and the reason with
which such a group was dropped."""
_ENCODER = msgspec.msgpack.Encoder()
_LINEAGE = (
    "SELECT seq, lineage, checkpoint_version, groups_per_step, group_size, max_staleness, on_stale, passes_per_batch, "
    "least_groups, replay_groups, replay_max_age, replay_max_reuses, "
    "(SELECT reason FROM trainer_restarts WHERE trainer_restarts.seq = lineages.seq) FROM lineages"
)
_QUERIES: dict[FactKind, str] = {
    "lineage": _LINEAGE,
    "skips": "SELECT seq, draw, rate, num_tokens FROM skipped_draws",
    "admission": "SELECT seq, group_id, version, started, draw FROM groups",
    "sample": "SELECT seq, group_id, sample_index, num_tokens, first_version, last_version, verdict_kind, value, "
    "is_kept, worker, facts, offset, size FROM samples",
    "end": "SELECT end_seq, group_id, fate, reason, detail, step FROM groups",
    "batch": "SELECT seq, step, lineage, is_replay, groups, reused FROM batches",
    "checkpoint": "SELECT seq, version, lineage, path FROM checkpoints",
    "evaluation": 'SELECT seq, version, lineage, kind, "values" FROM evals',
    "incident": "SELECT seq, kind, text FROM incidents",
}
_KEYS: dict[FactKind, str] = {
    "admission": "group_id = ?", "end": "group_id = ?", "skips": "draw = ?",
    "sample": "group_id = ? AND sample_index = ?",
}  # fmt: skip
_CUT = "SELECT sample_index, num_tokens FROM cut_samples WHERE group_id = ? ORDER BY sample_index"
_MEMBERS = (
    "SELECT sample_index, content, verdict_kind, value, num_tokens, first_version, last_version "
    "FROM samples LEFT JOIN digests USING (seq) WHERE group_id = ?"
)


class Fact(NamedTuple):
    """A recorded fact as it is covered by its digest. `rows`: the row of its table, then rows that belong to it."""

    seq: int
    kind: FactKind
    rows: tuple[tuple[Any, ...], ...]

    @property
    def words(self) -> str:
        """Name of the fact for messages."""
        row = self.rows[0]
        match self.kind:
            case "sample":
                return f"group {row[0]} sample {row[1]}"
            case "admission":
                return f"the admission of group {row[0]}"
            case "end":
                return f"the end of group {row[0]}"
            case "batch":
                return f"the batch of step {row[0]} (lineage {row[1]})"
            case "checkpoint":
                return f"the checkpoint of version {row[0]} (lineage {row[1]})"
            case "evaluation":
                return f"the evaluation of version {row[0]}"
            case "lineage":
                return f"the lineage {row[0]}"
            case "skips":
                return f"the skipped draw {row[0]}"
            case _:
                return f"the incident {str(row[1])[:60]!r}"


def sha256(data: bytes) -> bytes:
    """SHA-256 of bytes, 32 bytes."""
    return hashlib.sha256(data).digest()


def first_link(run_id: str, since: int) -> bytes:
    """What the first digest of a ledger follows. since: number of the last fact recorded before digests existed."""
    return sha256(_ENCODER.encode(["areal-like ledger", run_id, since]))


def fact_digest(before: bytes, fact: Fact, content: bytes | None, file: int | None) -> bytes:
    """Digest of a fact, given the digest of the fact before it, that of its content, and the file of its payload."""
    rows = [_stripped(row) for row in fact.rows]
    return sha256(_ENCODER.encode([before, fact.kind, fact.seq, rows, content, file]))


def _stripped(row: Sequence[Any]) -> Sequence[Any]:
    end = len(row)
    while end and row[end - 1] is None:
        end -= 1
    return row[:end]


# ---------------------------------------------------------------- reading facts


def read_fact(db: sqlite3.Connection, seq: int, kind: FactKind, *keys: tuple[int, ...]) -> Fact:
    """Read one fact by the keys of its rows, or by its number if there are none. Raises LedgerError: it is missing."""
    condition = _KEYS.get(kind, "seq = ?")
    rows = []
    for key in sorted(keys) or [(seq,)]:
        row = db.execute(f"{_QUERIES[kind]} WHERE {condition}", key).fetchone()
        if row is None:
            raise LedgerError(
                f"record {seq} ({kind}) of the ledger refers to the row with the key {key}, which is missing"
            )
        rows.append(tuple(row[1:]))
    return Fact(seq, kind, (*rows, *_attached(db, seq, kind, rows[0])))


def _attached(db: sqlite3.Connection, seq: int, kind: FactKind, row: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
    """Rows of other tables that belong to a fact: lengths of cut samples, and groups that a batch consumed."""
    if kind == "end":
        return db.execute(_CUT, (row[0],)).fetchall()
    if kind != "batch" or row[2]:
        return ()
    ids = sorted({group.group_id for group in decode_groups(row[3])})
    query = "SELECT group_id, fate, reason, detail, step FROM groups WHERE group_id = ? AND end_seq = ?"
    return [tuple(found) for group_id in ids if (found := db.execute(query, (group_id, seq)).fetchone()) is not None]


def all_facts(db: sqlite3.Connection) -> Iterator[Fact]:
    """Every fact of a ledger, by number. Raises sqlite3.Error, ValueError, TypeError (damaged)."""
    return heapq.merge(*(_facts_of(db, kind) for kind in _QUERIES), key=lambda fact: fact.seq)


def _facts_of(db: sqlite3.Connection, kind: FactKind) -> Iterator[Fact]:
    query, attached = _QUERIES[kind], _attached_rows(db, kind)
    if kind == "skips":
        for seq, rows in itertools.groupby(db.execute(f"{query} ORDER BY seq, draw"), key=lambda row: row[0]):
            yield Fact(seq, kind, tuple(row[1:] for row in rows))
        return
    condition = " WHERE fate NOT IN ('live', 'consumed')" if kind == "end" else ""
    for seq, *row in db.execute(f"{query}{condition} ORDER BY 1"):
        more = attached.get(seq if kind == "batch" else row[0], ())
        yield Fact(seq, kind, (tuple(row), *more))


def _attached_rows(db: sqlite3.Connection, kind: FactKind) -> dict[Any, list[tuple[Any, ...]]]:
    """What `_attached` finds for each fact of a kind, by group (end) or number (batch)."""
    queries = {
        "end": "SELECT group_id, sample_index, num_tokens FROM cut_samples ORDER BY 1, 2",
        "batch": "SELECT end_seq, group_id, fate, reason, detail, step FROM groups WHERE fate = 'consumed' ORDER BY 2",
    }
    found: dict[Any, list[tuple[Any, ...]]] = {}
    for number, *row in db.execute(queries[kind]) if kind in queries else ():
        found.setdefault(number, []).append(tuple(row))
    return found


def erased_groups(db: sqlite3.Connection) -> set[int]:
    """Groups whose tokens were erased on request. Raises sqlite3.Error, ValueError (damaged)."""
    if not has_column(db, "incidents", "text"):  # a ledger of an older schema
        return set()
    texts = db.execute("SELECT text FROM incidents WHERE kind = ?", (ERASED,)).fetchall()
    return {int(group) for (text,) in texts for group in text.split()}


# ---------------------------------------------------------------- policy digest


def policy_digest(db: sqlite3.Connection, seq: int, fact: Fact) -> bytes:
    """Digest of everything that a step trained on, up to and including this batch.

    It covers the policy digest of the step before (along the lineage that this record continues) and, in the order of
    the batch, each group's place in the draw order and version, and each sample's payload, verdict and versions. A step
    that is sent again after a restart has the same policy digest. Raises sqlite3.Error, ValueError (damaged).
    """
    step, _, _, groups, reused = (*fact.rows[0], None)[:5]
    before = db.execute(
        "SELECT content FROM batches LEFT JOIN digests USING (seq) WHERE step = ? AND seq < ? "
        "ORDER BY seq DESC LIMIT 1",
        (step - 1, seq),
    ).fetchone()
    parts = [_members(db, group) for blob in (groups, reused) if blob is not None for group in decode_groups(blob)]
    return sha256(_ENCODER.encode([before[0] if before else None, step, parts, reused is not None]))


def _members(db: sqlite3.Connection, group: BatchGroup) -> list[Any]:
    row = db.execute("SELECT draw, version FROM groups WHERE group_id = ?", (group.group_id,)).fetchone()
    samples = {index: rest for index, *rest in db.execute(_MEMBERS, (group.group_id,))}
    chosen = [[index, samples.get(index)] for index in group.sample_indices]
    return [group.group_id, row, group.first_version, chosen]
