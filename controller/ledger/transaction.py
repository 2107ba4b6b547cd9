"""The rows of one ledger transaction: converts entries (an effect with its payload) to rows.

Transactions are in ledger.py.
"""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple

import msgspec

from areal_like.encryption.texts import Texts
from areal_like.trajectory import Segment, Trajectory
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.verdict import Verdict
from controller.coordinator.effects import (
    DropGroup,
    Effect,
    FilterGroup,
    RecordBatch,
    RecordCheckpoint,
    RecordEval,
    RecordGroup,
    RecordIncident,
    RecordLineage,
    RecordSkips,
    StoreFinished,
    StorePartial,
)
from controller.ledger.digests import ERASED, FactKind, fact_digest, policy_digest, read_fact
from controller.ledger.schema import encode_groups
from controller.ledger.segment_store import SegmentStore, pack_sample, pack_segment


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger effect with the payload it refers to.

    StorePartial requires `segment` (as reported: the ledger applies `skip`) and may have `checkpoint`. StoreFinished of
    purpose "train" requires `trajectories`, the main one first, and `verdict`; response_text, timings and worker are
    stored for display.
    """

    effect: Effect
    segment: Segment | None = None
    checkpoint: TurnCheckpoint | None = None
    trajectories: tuple[Trajectory, ...] = ()
    verdict: Verdict | None = None
    response_text: str = ""
    timings: dict[str, float] = {}
    worker: str = ""


class _NewFact(NamedTuple):
    """A fact of this transaction that gets a digest: its number, the keys of its rows, the digest of its content, and
    the file of its payload.
    """

    seq: int
    kind: FactKind
    keys: tuple[tuple[int, ...], ...]
    content: bytes | None
    file: int | None


class Burst:
    """The rows of one transaction, collected so that each statement runs once."""

    def __init__(self, seq: int, segments: SegmentStore, texts: Texts) -> None:
        """texts: encrypts reasons and other words, which may quote prompts and answers, if the run is encrypted."""
        self.seq = seq
        self._segments = segments
        self._sealed = texts.sealed
        self._rows: dict[str, list[tuple[Any, ...]]] = {statement: [] for statement in _STATEMENTS}
        self._facts: list[_NewFact] = []

    def add(self, entry: LedgerEntry) -> None:
        self.seq += 1
        effect = entry.effect
        match effect:
            case StorePartial():
                self._add_partial(effect, entry)
            case StoreFinished():
                if effect.purpose == "train":
                    self._add_finished(effect, entry)
            case RecordGroup():
                self._put("group", effect.group_id, effect.version, effect.started, self.seq, effect.draw)
                self._add_fact("admission", (effect.group_id,))
            case RecordSkips():
                for skip in effect.draws:
                    self._put("skip", skip.draw, self.seq, skip.rate, skip.num_tokens)
                if effect.draws:
                    self._add_fact("skips", *((skip.draw,) for skip in effect.draws))
            case DropGroup():
                detail = self._sealed("detail", effect.detail)
                self._put("end", "dropped", effect.reason, detail, self.seq, effect.group_id)
                self._put("cut", effect.group_id)
                self._put("forget_group", effect.group_id)
                self._add_fact("end", (effect.group_id,))
            case FilterGroup():
                self._put("end", "filtered", "", f"{effect.value:g}", self.seq, effect.group_id)
                self._add_fact("end", (effect.group_id,))
            case RecordBatch():
                blob = encode_groups(effect.groups)
                reused = encode_groups(effect.reused) if effect.reused else None
                self._put("batch", self.seq, effect.step, effect.lineage, effect.is_replay, blob, reused)
                if not effect.is_replay:
                    for group in effect.groups:
                        self._put("consume", effect.step, self.seq, group.group_id)
                self._add_fact("batch")
            case RecordCheckpoint():
                self._put("checkpoint", self.seq, effect.version, effect.lineage, effect.path)
                self._add_fact("checkpoint", content=bytes.fromhex(effect.digest) or None)
            case RecordEval():
                blob = msgspec.msgpack.encode(effect.values)
                self._put("eval", self.seq, effect.version, effect.lineage, effect.kind, blob)
                self._add_fact("evaluation")
            case RecordIncident():
                text = effect.text if effect.kind == ERASED else self._sealed("text", effect.text)
                self._put("incident", self.seq, effect.kind, text)
                self._add_fact("incident")
            case RecordLineage():
                *facts, trainer_died = msgspec.structs.astuple(effect)
                self._put("lineage", self.seq, *facts)
                if trainer_died:
                    self._put("trainer_restart", self.seq, effect.lineage, self._sealed("reason", trainer_died))
                self._add_fact("lineage")
            case _:
                raise AssertionError(f"this effect cannot be stored in the ledger: {effect!r}")

    def _put(self, statement: str, *row: Any) -> None:
        self._rows[statement].append(row)

    def _add_fact(
        self, kind: FactKind, *keys: tuple[int, ...], content: bytes | None = None, file: int | None = None
    ) -> None:
        self._facts.append(_NewFact(self.seq, kind, keys, content, file))

    def _add_partial(self, effect: StorePartial, entry: LedgerEntry) -> None:
        assert entry.segment is not None, "StorePartial needs its segment"
        segment = entry.segment.tail(effect.skip) if effect.skip else entry.segment
        assert len(segment) == effect.num_tokens
        place = self._segments.append(pack_segment(segment, entry.checkpoint))
        first, last = segment.first_version, segment.last_version
        self._put("partial", effect.group_id, effect.sample_index, effect.start, effect.num_tokens, first, last, *place)

    def _add_finished(self, effect: StoreFinished, entry: LedgerEntry) -> None:
        assert entry.trajectories, "StoreFinished needs its trajectories"
        payload = pack_sample(entry.trajectories, entry.response_text)
        place = self._segments.append(payload)
        verdict = entry.verdict
        assert verdict is not None, "StoreFinished needs its verdict"
        facts: dict[str, Any] = {
            "components": verdict.components,
            "reason": self._sealed("reason", verdict.reason),
            "timings": entry.timings,
            "finish_reason": entry.trajectories[0].finish_reason,
            "scorer": verdict.scorer,
        }
        if (num_turns := sum(one.num_turns for one in entry.trajectories)) > 1:
            facts |= {"turns": num_turns, "trajectories": len(entry.trajectories)}
        if effect.policy:
            facts |= {
                "failed_in": verdict.failed_in,
                "attempts": verdict.attempts,
                "policy": effect.policy,
            }
        outcome = effect.outcome
        self._put(
            "finished",
            outcome.group_id, outcome.sample_index, self.seq, outcome.num_tokens, outcome.first_version,
            outcome.last_version, outcome.verdict_kind, effect.value, effect.is_kept, entry.worker,
            msgspec.json.encode(facts), *place,
        )  # fmt: skip
        self._put("forget_partial", outcome.group_id, outcome.sample_index)
        self._add_fact(
            "sample", (outcome.group_id, outcome.sample_index), content=self._segments.digest(payload), file=place.file
        )

    def write(self, db: sqlite3.Connection, last_digest: bytes) -> bytes:
        """Write the rows and the digests of their facts. last_digest: that of the fact before; returns the newest."""
        for statement, rows in self._rows.items():
            if rows:
                db.executemany(_STATEMENTS[statement], rows)
        for new in self._facts:
            fact = read_fact(db, new.seq, new.kind, *new.keys)  # as SQLite returns it, so that the types are the same
            content = policy_digest(db, new.seq, fact) if new.kind == "batch" else new.content
            last_digest = fact_digest(last_digest, fact, content, new.file)
            db.execute("INSERT INTO digests VALUES (?, ?, ?, ?)", (new.seq, last_digest, content, new.file))
        counters = [(str(self.seq), "seq"), (last_digest.hex(), "last_digest")]
        db.executemany("UPDATE meta SET value = ? WHERE key = ?", counters)
        return last_digest


_STATEMENTS = {
    "lineage": "INSERT INTO lineages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "trainer_restart": "INSERT INTO trainer_restarts VALUES (?, ?, ?)",
    "group": "INSERT INTO groups (group_id, version, started, seq, draw) VALUES (?, ?, ?, ?, ?)",
    "skip": "INSERT INTO skipped_draws VALUES (?, ?, ?, ?)",
    "partial": "INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "finished": "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "forget_partial": "DELETE FROM partials WHERE group_id = ? AND sample_index = ?",
    "end": "UPDATE groups SET fate = ?, reason = ?, detail = ?, end_seq = ? WHERE group_id = ?",
    "cut": "INSERT OR IGNORE INTO cut_samples "
    "SELECT group_id, sample_index, SUM(num_tokens) FROM partials WHERE group_id = ? GROUP BY sample_index",
    "forget_group": "DELETE FROM partials WHERE group_id = ?",
    "batch": "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)",
    "consume": "UPDATE groups SET fate = 'consumed', step = ?, end_seq = ? WHERE group_id = ?",
    "checkpoint": "INSERT INTO checkpoints VALUES (?, ?, ?, ?)",
    "eval": "INSERT INTO evals VALUES (?, ?, ?, ?, ?)",
    "incident": "INSERT INTO incidents VALUES (?, ?, ?)",
}
"""In order of execution: a group is inserted before it ends, a partial before it is replaced."""
