"""`areal-like blame`: what a version of the policy was trained on, from the ledger.

Counts steps, samples, rows by source, versions, staleness and reused groups along the lineage that led to the version.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from typing import Any

import msgspec

from areal_like.errors import UserError
from controller.ledger.read_only import check_schema, open_ledger
from controller.ledger.schema import decode_groups, has_column
from controller.run_folder.formatting import printable
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.damaged import DAMAGED
from controller.runs.verify.data_rows import read_rows
from controller.runs.verify.target import find_target

MAX_ROWS = 5


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """What went into a version. Counters are by step, version, staleness, verdict or source."""

    run: str
    version: int
    lineages: dict[str, int]
    """Steps by the lineage that trained them."""
    num_groups: int
    num_samples: int
    num_tokens: int
    """Sampled tokens of these samples, each counted once."""
    verdicts: dict[str, int]
    workers: dict[str, int]
    """Samples by the worker that finished them."""
    versions: dict[int, int]
    """Samples by the version of their first token."""
    staleness: dict[int, int]
    """Groups by staleness in the step that they were generated for."""
    num_mixed: int
    """Samples with tokens of several versions."""
    num_reused_groups: int
    num_reuses: int
    """Times that later steps used groups again."""
    num_draws: int
    """Different positions of the draw order."""
    rows: dict[str, int]
    """Different rows by source; empty if the data cannot be read."""
    draws: dict[str, int]
    """Groups by source; empty if the data cannot be read."""
    most_used: dict[str, int]
    """Rows that were used most often, with how often."""
    rows_note: str
    """Why rows are not named."""
    policy_digest: str
    """Digest of all of this; empty for a ledger without digests."""


def blame_command(source: str, *, run: str, format: str) -> int:
    """Print what went into a model; return the exit status, 0. Raises UserError."""
    target = find_target(source, run)
    found = blame(target.run, target.version)
    if format == "json":
        print(json.dumps(msgspec.to_builtins(found, str_keys=True), ensure_ascii=False, indent=1))
    else:
        for line in lines(found):
            print(printable(line))
    return 0


def blame(folder: RunFolder, version: int | None = None) -> Blame:
    """Count what a version was trained on.

    Args:
        folder: the run.
        version: the version; None: that after the newest recorded step.

    Raises:
        UserError: there is no ledger, it is damaged, or the run has no such version.
    """
    if not folder.ledger.is_file():
        what = "the run has no ledger, because nothing has been trained yet or because it trains from files"
        remedy = "wait until the run has trained a step, or specify a run that was started with `areal-like train`"
        raise UserError(what, where=str(folder.root), remedy=remedy)
    try:
        db, _ = open_ledger(folder)
        with contextlib.closing(db):
            check_schema(db, folder)
            return _count(db, folder, version)
    except DAMAGED as error:
        if isinstance(error, UserError):
            raise
        remedy = "run areal-like verify to see what is damaged"
        raise UserError(f"the file cannot be read ({error})", where=str(folder.ledger), remedy=remedy) from error


def _count(db: sqlite3.Connection, folder: RunFolder, version: int | None) -> Blame:
    reused_column = "reused" if has_column(db, "batches", "reused") else "NULL"
    query = f"SELECT seq, step, lineage, groups, {reused_column} FROM batches ORDER BY seq"
    newest = {step: (seq, lineage, groups, reused) for seq, step, lineage, groups, reused in db.execute(query)}
    last = max(newest, default=0) if version is None else version
    if not 0 <= last <= max(newest, default=0):
        has = f"the ledger has steps 1 to {max(newest)}" if newest else "no step has been recorded yet"
        raise UserError(f"the run has no version {last}", where=folder.name, remedy=has)
    steps = {step: entry for step, entry in newest.items() if step <= last}
    groups = {group.group_id: step for step, entry in steps.items() for group in decode_groups(entry[2])}
    kept = {
        (group.group_id, i)
        for _, entry in steps.items()
        for group in decode_groups(entry[2])
        for i in group.sample_indices
    }
    reuses = Counter(group.group_id for entry in steps.values() if entry[3] for group in decode_groups(entry[3]))
    facts = "SELECT group_id, sample_index, num_tokens, first_version, last_version, verdict_kind, worker FROM samples"
    rows = [row for row in db.execute(facts) if row[0] in groups]
    oldest: dict[int, int] = {}
    for row in rows:
        oldest[row[0]] = min(row[3], oldest.get(row[0], row[3]))
    samples = [row for row in rows if (row[0], row[1]) in kept]
    draw = "COALESCE(draw, group_id)" if has_column(db, "groups", "draw") else "group_id"
    places = f"SELECT group_id, {draw} FROM groups"
    draws = Counter(draw for group_id, draw in db.execute(places) if group_id in groups)
    return Blame(
        run=str(folder.root), version=last,
        lineages=dict(Counter(entry[1] for entry in steps.values())),
        num_groups=len(groups), num_samples=len(samples), num_tokens=sum(row[2] for row in samples),
        verdicts=dict(Counter(row[5] for row in samples)),
        workers=dict(sorted(Counter(row[6] for row in samples).items())),
        versions=dict(sorted(Counter(row[3] for row in samples).items())),
        staleness=dict(sorted(Counter(groups[one] - 1 - old for one, old in oldest.items()).items())),
        num_mixed=sum(row[3] != row[4] for row in samples),
        num_reused_groups=len(reuses), num_reuses=sum(reuses.values()),
        num_draws=len(draws), policy_digest=_policy_digest(db, steps.get(last)), **_rows(folder, draws),
    )  # fmt: skip


def _rows(folder: RunFolder, draws: Counter[int]) -> dict[str, Any]:
    rows, why = read_rows(folder)
    if rows is None:
        return {"rows": {}, "draws": {}, "most_used": {}, "rows_note": why}
    used = Counter[str]()
    places: dict[str, set[str]] = {}
    sources = Counter[str]()
    for draw, count in draws.items():
        source, where = rows.source(draw), rows.where(draw)
        used[where] += count
        sources[source] += count
        places.setdefault(source, set()).add(where)
    return {
        "rows": {source: len(found) for source, found in sorted(places.items())},
        "draws": dict(sorted(sources.items())), "most_used": dict(used.most_common(MAX_ROWS)), "rows_note": "",
    }  # fmt: skip


def _policy_digest(db: sqlite3.Connection, entry: tuple[Any, ...] | None) -> str:
    if entry is None or db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digests'").fetchone() is None:
        return ""
    row = db.execute("SELECT content FROM digests WHERE seq = ?", (entry[0],)).fetchone()
    return row[0].hex() if row is not None and isinstance(row[0], bytes) else ""


def lines(found: Blame) -> list[str]:
    """The result as text."""
    steps = ", ".join(f"{count} of lineage {name}" for name, count in found.lineages.items()) or "none"
    text = [
        f"version {found.version} of {found.run}",
        f"steps         {sum(found.lineages.values())} ({steps})",
        f"samples       {found.num_samples:,} of {found.num_groups:,} groups, {found.num_tokens:,} tokens "
        f"({_counts(found.verdicts)})",
        f"workers       {_counts(found.workers)}",
        f"versions      {len(found.versions)} versions sampled first tokens; {found.num_mixed:,} samples have tokens "
        "of several versions",
        f"staleness     {', '.join(f'{count:,} groups at {age}' for age, count in found.staleness.items()) or 'none'}",
        f"reused        {found.num_reused_groups:,} groups, {found.num_reuses:,} times",
    ]
    if found.rows_note:
        text.append(f"rows          {found.num_draws:,} draws; rows cannot be identified: {found.rows_note}")
    for source, count in found.rows.items():
        text.append(f"rows          {count:,} of {source}, in {found.draws[source]:,} groups")
    if found.most_used:
        text.append(f"most used     {', '.join(f'{where} ({count})' for where, count in found.most_used.items())}")
    if found.policy_digest:
        text.append(f"digest        {found.policy_digest}")
    return text


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counter.items()) or "none"
