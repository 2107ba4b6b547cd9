"""`areal-like samples RUN --life GROUP.SAMPLE`: the life of a sample in sentences, from the ledger and the metrics.

The ledger numbers its facts but has no clock. Durations are those that the worker measured; the time of a step is that
of its row in metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from areal_like.encryption.texts import Texts
from areal_like.errors import LedgerError, UserError
from areal_like.metrics import read_jsonl
from areal_like.trajectory import Trajectory
from controller.ledger.ledger import SEGMENT_FOLDER
from controller.ledger.read_only import check_schema, open_ledger
from controller.ledger.schema import decode_groups, has_column
from controller.ledger.segment_store import Location, SegmentStore, unpack_sample
from controller.run_folder.formatting import printable
from controller.run_folder.run_folder import NO_LEDGER, RunFolder
from controller.runs.verify.damaged import DAMAGED
from controller.runs.verify.data_rows import read_rows

_GROUP = "SELECT version, started, seq, fate, reason, detail, step, end_seq, {draw} FROM groups WHERE group_id = ?"
_SAMPLES = (
    "SELECT sample_index, seq, num_tokens, first_version, last_version, verdict_kind, value, is_kept, worker, facts, "
    "file, offset, size FROM samples WHERE group_id = ? ORDER BY sample_index"
)
_PHASES = {
    "queue_s": "waited for the engine", "generate_s": "was generated", "paused_s": "was paused for new weights",
    "score_s": "was scored", "version_wait_s": "waited for a version",
}  # fmt: skip


def print_life(folder: RunFolder, group_id: int, index: int | None) -> int:
    """Print the life of a sample, or of all samples of a group; return the exit status, 0. Raises UserError."""
    if not folder.ledger.is_file():
        raise UserError(
            NO_LEDGER,
            where=str(folder.root),
            remedy="wait until the run has generated samples, or specify a run that was started with "
            "`areal-like train`",
        )
    try:
        db, _ = open_ledger(folder)
        with contextlib.closing(db):
            check_schema(db, folder)
            for line in life(db, folder, group_id, index):
                print(printable(line))
    except DAMAGED as error:
        if isinstance(error, UserError):
            raise
        remedy = "run areal-like verify to see what is damaged"
        raise UserError(f"the file cannot be read ({error})", where=str(folder.ledger), remedy=remedy) from error
    return 0


def life(db: sqlite3.Connection, folder: RunFolder, group_id: int, index: int | None) -> Iterator[str]:
    """The sentences. Raises UserError (no such sample), sqlite3.Error or ValueError (damaged)."""
    draw = "COALESCE(draw, group_id)" if has_column(db, "groups", "draw") else "group_id"
    group = db.execute(_GROUP.format(draw=draw), (group_id,)).fetchone()
    if group is None:
        (num,) = db.execute("SELECT COUNT(*) FROM groups").fetchone()
        remedy = f"groups are numbered from 0 to {num - 1}" if num else "no group has been drawn yet"
        raise UserError(f"there is no group {group_id}", where=folder.name, remedy=remedy)
    samples = [row for row in db.execute(_SAMPLES, (group_id,)) if index is None or row[0] == index]
    partials = _partials(db, group_id, index)
    if not samples and not partials:
        there = ", ".join(
            str(one) for (one,) in db.execute("SELECT sample_index FROM samples WHERE group_id = ?", (group_id,))
        )
        remedy = f"its samples are {there}" if there else "none of its samples has tokens yet"
        raise UserError(f"group {group_id} has no sample {index}", where=folder.name, remedy=remedy)
    yield from _drawn(folder, group_id, group)
    yield from partials
    for row in samples:
        yield from _sample(db, folder, group_id, row)
    yield from _fate(db, folder, group_id, group, {row[0] for row in samples})


def _drawn(folder: RunFolder, group_id: int, group: Sequence[Any]) -> Iterator[str]:
    version, started, seq, *_, draw = group
    rows, why = read_rows(folder)
    yield f"Group {group_id} was drawn at position {draw} of the draw order."
    if rows is not None:
        yield f"Its row is {rows.where(draw)} ({rows.source(draw)})."
    else:
        yield f"Its row cannot be identified: {why}."
    yield f"It was admitted at version {version} as started group number {started} (fact {seq})."


def _partials(db: sqlite3.Connection, group_id: int, index: int | None) -> list[str]:
    rows = db.execute(
        "SELECT sample_index, SUM(num_tokens), COUNT(*), MIN(first_version), MAX(last_version) FROM partials "
        "WHERE group_id = ? GROUP BY sample_index",
        (group_id,),
    ).fetchall()
    if has_column(db, "cut_samples", "num_tokens"):
        cut = "SELECT sample_index, num_tokens, NULL, NULL, NULL FROM cut_samples WHERE group_id = ?"
        rows += db.execute(cut, (group_id,)).fetchall()
    found = []
    for one, num_tokens, reports, first, last in rows:
        name = f"Sample {group_id}.{one}"
        if index is not None and one != index:
            continue
        if reports is None:
            found.append(f"{name} was unfinished at {num_tokens} tokens when its group was dropped.")
        else:
            versions = _versions(first, last)
            found.append(f"{name} is unfinished: {num_tokens} tokens in {reports} reports, {versions}.")
    return found


def _sample(db: sqlite3.Connection, folder: RunFolder, group_id: int, row: Sequence[Any]) -> Iterator[str]:
    index, seq, num_tokens, first, last, kind, value, is_kept, worker, blob, *place = row
    facts, name = msgspec.json.decode(blob), f"Sample {group_id}.{index}"
    facts["reason"] = Texts.to_show(folder.root).opened("reason", str(facts.get("reason") or ""))
    yield f"{name} was finished by {worker or 'a worker'}: {num_tokens} tokens, {_versions(first, last)} (fact {seq})."
    yield from _generated(folder, place, first != last)
    if spent := [
        f"{_PHASES[key]} for {value_s:.3g} s" for key, value_s in _timings(facts) if key in _PHASES and value_s
    ]:
        yield f"It {_joined(spent)}."
    if facts.get("finish_reason"):
        ends = {"stop": "a stop token", "length": "the limit of tokens", "environment": "its environment"}
        yield f"It was ended by {ends.get(facts['finish_reason'], facts['finish_reason'])}."
    yield f"{_verdict(kind, value, facts)}{'' if is_kept else '; it was excluded from its group'}."
    if (digest := _digest(db, seq)) is not None:
        yield f"The digest of its tokens is {digest}."


def _generated(folder: RunFolder, place: Sequence[Any], is_mixed: bool) -> Iterator[str]:
    """Which tokens each version sampled, if the tokens are still stored."""
    if place[0] is None:
        yield "Its tokens were removed after a checkpoint covered them."
        return
    segments = SegmentStore(folder.root / SEGMENT_FOLDER, segment_bytes=1, fsync=False)
    try:
        trajectories, _ = unpack_sample(segments.read(Location(*place)))
    except LedgerError as error:
        yield f"Its tokens cannot be read: {error}."
        return
    finally:
        segments.close()
    if is_mixed:
        yield f"New weights interrupted it: {_joined(_runs(trajectories))}."


def _runs(trajectories: Sequence[Trajectory]) -> list[str]:
    found = []
    for trajectory in trajectories:
        versions = trajectory.versions_T[trajectory.loss_mask_T]
        starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        for start, end in itertools.pairwise(starts):
            found.append(f"tokens {start + 1} to {end} are of version {int(versions[start])}")
    return found


def _verdict(kind: str, value: float | None, facts: Mapping[str, Any]) -> str:
    scorer = f" by {facts['scorer']}" if facts.get("scorer") else ""
    reason = f" ({facts['reason']})" if facts.get("reason") else ""
    if kind == "scored":
        parts = ", ".join(f"{key} {part:g}" for key, part in (facts.get("components") or {}).items())
        return f"It was scored{scorer}{reason}: reward {value:g}" + (f" ({parts})" if parts else "")
    used = f"; the configured reward {value:g} was used" if value is not None else ""
    return f"It has no score: {kind.replace('_', ' ')}{reason}{used}"


def _fate(
    db: sqlite3.Connection, folder: RunFolder, group_id: int, group: Sequence[Any], indices: set[int]
) -> Iterator[str]:
    *_, fate, reason, detail, step, end_seq, _ = group
    if fate == "live":
        yield "No step has used its group yet."
        return
    if fate == "dropped":
        detail = Texts.to_show(folder.root).opened("detail", detail)
        yield f"Its group was dropped: {reason}{f' ({detail})' if detail else ''} (fact {end_seq})."
        return
    if fate == "filtered":
        yield f"Its group was filtered: all of its rewards are {detail} (fact {end_seq})."
        return
    (oldest,) = db.execute("SELECT MIN(first_version) FROM samples WHERE group_id = ?", (group_id,)).fetchone()
    times = {row["step"]: row.get("time_s") for row in read_jsonl(folder.metrics) if row.get("kind") == "step"}
    yield f"Step {step} used its group at staleness {step - 1 - oldest} (fact {end_seq}){_at(times.get(step))}."
    reused_column = "reused" if has_column(db, "batches", "reused") else "NULL"
    for number_, *blobs in db.execute(f"SELECT step, is_replay, groups, {reused_column} FROM batches ORDER BY seq"):
        is_replay, groups, reused = blobs
        if is_replay and any(one.group_id == group_id for one in decode_groups(groups)):
            yield f"Step {number_} was trained again with the same batch after a restart."
        if reused and any(one.group_id == group_id for one in decode_groups(reused)):
            yield f"Step {number_} used it again (replay_buffer){_at(times.get(number_))}."


def _digest(db: sqlite3.Connection, seq: int) -> str | None:
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digests'").fetchone() is None:
        return None
    row = db.execute("SELECT content FROM digests WHERE seq = ?", (seq,)).fetchone()
    return row[0].hex() if row is not None and isinstance(row[0], bytes) else None


def _timings(facts: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(key, float(value)) for key, value in (facts.get("timings") or {}).items()]


def _versions(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"


def _at(time_s: float | None) -> str:
    return "" if time_s is None else time.strftime(", done at %Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
