"""Recomputes the digest of every fact of a ledger and of every stored payload (`recorded-chain`).

Read-only. How digests are made is in controller/ledger/digests.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from areal_like.errors import LedgerError
from controller.ledger.digests import (
    Fact,
    all_facts,
    erased_groups,
    fact_digest,
    first_link,
    policy_digest,
)
from controller.ledger.ledger import SEGMENT_FOLDER
from controller.ledger.migrations import SCHEMA_VERSION, schema_version
from controller.ledger.read_only import is_purged
from controller.ledger.segment_store import Location, SegmentStore

FIRST_SCHEMA = 8
"""First schema with digests."""


@dataclass
class Chain:
    """What was found. `breaks`: one line each, in the order of recorded facts; empty if every digest fits."""

    breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_facts: int = 0
    """Facts whose digest was recomputed."""
    num_payloads: int = 0
    """Samples whose stored tokens were compared with their digest."""
    num_purged: int = 0
    """Samples whose tokens are no longer stored; their digest remains."""
    policy_digests: dict[int, str] = field(default_factory=dict)
    """By step, of the record that was written last: everything that this version was trained on."""
    checkpoints: dict[tuple[int, str], str | None] = field(default_factory=dict)
    """SHA-256 of the manifest by version and lineage; None: it was not recorded."""
    lineages: list[str] = field(default_factory=list)
    """Names, oldest first."""
    last_digest: str = ""
    has_digests: bool = True


def check_chain(db: sqlite3.Connection, run_dir: Path, chain: Chain, *, may_change: bool = False) -> None:
    """Recompute all digests and add what is found to `chain`. db: a read-only connection with one consistent view.

    may_change: the run may be in progress, so that files may be purged after this view began.
    Raises sqlite3.Error, ValueError, TypeError or KeyError for a ledger that cannot be read at all.
    """
    chain.lineages = [name for (name,) in db.execute("SELECT lineage FROM lineages ORDER BY seq")]
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    schema = schema_version(db)
    if ("digests" in tables) != (schema >= FIRST_SCHEMA):
        chain.breaks.append(
            f"ledger.sqlite: the schema version {schema} does not match the tables, so the schema version was changed"
        )
    if "digests" not in tables:
        chain.has_digests = False
        chain.notes.append(f"the ledger has schema version {schema}, which does not record digests")
        return
    meta = dict(db.execute("SELECT key, value FROM meta"))
    since = int(meta["digests_since"])
    _check_facts(db, chain, meta["run_id"], since)
    if chain.last_digest != meta["last_digest"] and not (chain.num_facts == 0 and meta["last_digest"] == ""):
        chain.breaks.append("ledger.sqlite: the last fact is not the last one that was recorded")
    _check_counters(db, chain, meta, schema)
    chain.breaks += _strays(db)
    _check_payloads(db, chain, run_dir, since, may_change=may_change)
    if since:
        chain.notes.append(
            f"facts 1 to {since} have no digests, because an earlier version of areal_like recorded them; they were "
            "only recounted"
        )


def _check_facts(db: sqlite3.Connection, chain: Chain, run_id: str, since: int) -> None:
    query = "SELECT seq, digest, content, file FROM digests"
    stored = {seq: (digest, content, file) for seq, digest, content, file in db.execute(query)}
    unseen = iter(sorted(stored))
    expected = next(unseen, None)
    before, last_seq = first_link(run_id, since), 0
    chain.last_digest = before.hex()
    for fact in all_facts(db):
        if fact.seq <= since:
            if fact.kind == "checkpoint":
                _take_content(db, chain, fact, None)
            continue
        if fact.seq == last_seq:
            chain.breaks.append(f"{fact.words}: the number {fact.seq} is also the number of another fact")
            continue
        while expected is not None and expected < fact.seq:
            chain.breaks.append(f"fact {expected} is missing, because it was removed or its number was changed")
            before = stored[expected][0]
            expected = next(unseen, None)
        last_seq = fact.seq
        if expected != fact.seq:
            chain.breaks.append(f"{fact.words} has no digest, because it was added or its number was changed")
            continue
        digest, content, file = stored[fact.seq]
        chain.num_facts += 1
        if fact_digest(before, fact, content, file) != digest:
            chain.breaks.append(
                f"{fact.words} differs from its digest, because it was changed or an earlier fact was removed"
            )
        _take_content(db, chain, fact, content)
        before = digest
        chain.last_digest = _hex(digest)
        expected = next(unseen, None)
    if expected is not None:
        chain.breaks.append(f"fact {expected} is missing, because it was removed or its number was changed")


def _take_content(db: sqlite3.Connection, chain: Chain, fact: Fact, content: bytes | None) -> None:
    if fact.kind == "checkpoint":
        version, lineage = fact.rows[0][:2]
        chain.checkpoints[version, lineage] = None if content is None else _hex(content)
    if fact.kind != "batch":
        return
    found = policy_digest(db, fact.seq, fact)
    if found != content:
        chain.breaks.append(f"{fact.words}: the samples or their order differ from the policy digest")
    chain.policy_digests[fact.rows[0][0]] = found.hex()


def _hex(value: object) -> str:
    """In hexadecimal digits; empty for a value that is no digest, which differs from what is expected."""
    return value.hex() if isinstance(value, bytes) else ""


def _check_counters(db: sqlite3.Connection, chain: Chain, meta: dict[str, str], schema: int) -> None:
    (last,) = db.execute("SELECT MAX(seq) FROM digests").fetchone()
    if int(meta["seq"]) < (last or 0):
        chain.breaks.append(f"ledger.sqlite counts {meta['seq']} facts, but contains fact {last}")
    if unknown := sorted(meta.keys() - {"run_id", "seq", "schema", "digests_since", "last_digest"}):
        chain.breaks.append(f"ledger.sqlite: the table meta has the unknown key {unknown[0]!r}")
    if schema > SCHEMA_VERSION:
        chain.breaks.append(f"ledger.sqlite: the schema version {schema} is newer than the one of this program")


def _strays(db: sqlite3.Connection) -> Iterator[str]:
    """Values that belong to no fact."""
    ended = "fate = 'live' AND (step IS NOT NULL OR end_seq IS NOT NULL OR reason != '' OR detail != '')"
    for (group_id,) in db.execute(f"SELECT group_id FROM groups WHERE {ended} ORDER BY group_id"):
        yield f"group {group_id} is in flight, but its end is recorded"
    dropped = "SELECT group_id FROM groups WHERE fate = 'dropped'"
    cut = f"SELECT DISTINCT group_id FROM cut_samples WHERE group_id NOT IN ({dropped})"
    for (group_id,) in db.execute(cut):
        yield f"group {group_id} has truncated samples, but was not dropped"
    restarts = "SELECT lineage FROM trainer_restarts WHERE (seq, lineage) NOT IN (SELECT seq, lineage FROM lineages)"
    for (lineage,) in db.execute(restarts):
        yield f"the lineage {lineage} is recorded as a restart, but not as a lineage"


class _Payload(NamedTuple):
    """Where the payload of a sample is, and was: files are purged as a whole."""

    group_id: int
    sample_index: int
    seq: int
    content: bytes | None
    file: int | None
    offset: int
    size: int
    first_file: int | None

    @property
    def words(self) -> str:
        return f"group {self.group_id} sample {self.sample_index}"


def _check_payloads(db: sqlite3.Connection, chain: Chain, run_dir: Path, since: int, *, may_change: bool) -> None:
    query = (
        "SELECT group_id, sample_index, seq, content, samples.file, offset, size, digests.file "
        "FROM samples LEFT JOIN digests USING (seq) ORDER BY samples.file, offset"
    )
    payloads = [_Payload(*row) for row in db.execute(query)]
    used = {payload.file for payload in payloads} | {file for (file,) in db.execute("SELECT file FROM partials")}
    folder, erased = run_dir / SEGMENT_FOLDER, erased_groups(db)
    if not folder.is_dir():
        chain.num_purged = len(payloads)
        if used - {None}:
            chain.breaks.append(f"{folder} is missing, but samples have stored tokens")
        return
    segments, gone = SegmentStore(folder, segment_bytes=1, fsync=False), set[int]()
    try:
        for payload in payloads:
            if payload.file is None:
                chain.num_purged += 1
                first = payload.first_file
                if first is not None and first in used and payload.group_id not in erased:
                    chain.breaks.append(f"{payload.words} is recorded as removed, but {segments.path(first)} is in use")
                continue
            found = _payload_break(segments, payload, since)
            if found is not None and may_change and (payload.file in gone or is_purged(run_dir, payload.file)):
                gone.add(payload.file)
                chain.num_purged += 1
                continue
            chain.num_payloads += 1
            if found is not None:
                chain.breaks.append(found)
    finally:
        segments.close()


def _payload_break(segments: SegmentStore, payload: _Payload, since: int) -> str | None:
    assert payload.file is not None
    try:
        data = segments.read(Location(payload.file, payload.offset, payload.size))
    except (LedgerError, OverflowError, TypeError, ValueError) as error:
        return f"{payload.words}: {error}"
    if payload.seq <= since or segments.digest(data) == payload.content:
        is_moved = payload.seq > since and payload.file != payload.first_file
        return f"{payload.words} is in a different file than the one in which it was stored" if is_moved else None
    where = f"{segments.path(payload.file)} at byte {payload.offset}"
    return f"{payload.words}: the tokens, log-probs or versions in {where} differ from their digest"
