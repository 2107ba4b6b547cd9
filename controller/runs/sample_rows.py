"""Reads finished samples of a run from its ledger and segment files, also while it is in progress.

Selects rows and joins their facts with tokens and text. The ledger is opened read-only. Output is in sample_text.py and
sample_page.py.

The facts of a sample are kept indefinitely. Its tokens are purged some time after a checkpoint covers them
(ledger.keep_mb), which the row then states. Of evaluation answers only the values are stored.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_like.encryption.texts import Texts
from areal_like.errors import LedgerError, UserError
from controller.ledger.ledger import SEGMENT_FOLDER
from controller.ledger.read_only import check_schema, open_ledger
from controller.ledger.segment_store import Location, SegmentStore, unpack_sample
from controller.run_folder.run_folder import RunFolder
from controller.runs.tokens import TokenText, TrajectoryText

Order = Literal["newest", "worst", "best", "given"]
Payload = Literal["stored", "purged", "damaged"]
SAMPLE_COLUMNS = (
    "group_id, sample_index, num_tokens, first_version, last_version, verdict_kind, value, is_kept, worker, facts, "
    "file, offset, size, fate, reason, step, "
    "(SELECT MIN(first_version) FROM samples mates WHERE mates.group_id = samples.group_id)"
)
_ORDERS = {
    "newest": "samples.seq DESC",
    "worst": "value ASC, samples.seq DESC",
    "best": "value DESC, samples.seq DESC",
    "given": "group_id, sample_index",
}


@dataclass(frozen=True)
class Choice:
    """Selection and order of samples. `limit` None: all. `grep` searches prompt and answer, ignoring case."""

    step: int | None = None
    group: int | None = None
    order: Order = "newest"
    limit: int | None = 20
    grep: str = ""

    def words(self) -> str:
        """Description for a headline."""
        parts = [
            {"newest": "newest first", "worst": "worst first", "best": "best first", "given": "in order"}[self.order]
        ]
        parts += [f"step {self.step}"] if self.step is not None else []
        parts += [f"group {self.group}"] if self.group is not None else []
        parts += [f"with {self.grep!r}"] if self.grep else []
        return ", ".join(parts)


POLICY_WORDS = {
    "drop_sample": "; the sample was dropped",
    "drop_group": "; its group was dropped",
    "value": "; a configured reward was used",
}


@dataclass(frozen=True)
class Sample:
    """One finished sample as shown. Texts are empty if the tokens are no longer stored."""

    group_id: int
    sample_index: int
    step: int | None
    """The step that used it."""
    fate: str
    """State of its group: live (not used yet), consumed, filtered, dropped."""
    fate_reason: str
    verdict: str
    reward: float | None
    components: dict[str, float]
    verdict_reason: str
    is_kept: bool
    staleness: int | None
    """Staleness of its group in the step that used it."""
    first_version: int
    last_version: int
    num_tokens: int
    """Tokens of the answer."""
    finish_reason: str
    worker: str
    timings: dict[str, float]
    payload: Payload
    prompt: str = ""
    answer: str = ""
    policy: str = ""
    """What was done about a missing score: drop_sample, drop_group, value; empty if there is a score."""
    pieces: Sequence[tuple[int, str]] = ()
    """The answer split where the weights changed: version and text; empty if it cannot be split without loss."""
    num_turns: int = 1
    """Number of answers of the policy, in all its trajectories."""
    num_trajectories: int = 1
    trajectories: Sequence[TrajectoryText] = ()
    """For an episode of several turns or trajectories: sampled and given text, the main trajectory first."""

    @property
    def name(self) -> str:
        """Name of the sample, same as in the trace."""
        return f"g{self.group_id}.{self.sample_index}"

    @property
    def versions(self) -> str:
        """`3`, or `3-5`."""
        first, last = self.first_version, self.last_version
        return str(first) if first == last else f"{first}-{last}"

    @property
    def texts(self) -> list[str]:
        """All texts that can be searched."""
        return [self.prompt, self.answer, *(span.text for one in self.trajectories for span in one.spans)]

    def remarks(self) -> list[str]:
        """Remarks on anything unusual."""
        found = []
        if self.num_trajectories > 1:
            found.append(f"{self.num_turns} turns in {self.num_trajectories} trajectories")
        elif self.num_turns > 1:
            found.append(f"{self.num_turns} turns")
        if self.verdict != "scored":
            reason = f" ({self.verdict_reason})" if self.verdict_reason else ""
            found.append(f"no score: {self.verdict}{reason}{POLICY_WORDS.get(self.policy, '')}")
        elif self.verdict_reason:
            found.append(f"scorer: {self.verdict_reason}")
        if self.fate == "live":
            found.append("not yet used by a step")
        elif self.fate != "consumed":
            found.append(f"its group was {self.fate}" + (f" ({self.fate_reason})" if self.fate_reason else ""))
        if not self.is_kept:
            found.append("left out of its group")
        if self.payload != "stored":
            gone = "no longer stored, because a checkpoint covers them (see ledger.keep_mb)"
            found.append(f"its tokens are {gone if self.payload == 'purged' else 'damaged on disk'}")
        return found


@dataclass
class Found:
    """Result of a query. `num_matching` counts the samples in the ledger that match the choice without grep."""

    samples: list[Sample]
    num_matching: int
    num_stored: int
    problems: list[str] = field(default_factory=list)


def read_samples(folder: RunFolder, choice: Choice) -> Found:
    """Read samples of a run. Raises UserError if the ledger is missing, damaged or of a newer version, or the step or
    group does not exist.
    """
    if not folder.ledger.is_file():
        raise UserError(
            "the run has no ledger, because nothing has been generated yet",
            where=str(folder.root),
            remedy="wait until the run has generated samples, or specify a different run",
        )
    text = TokenText.of(folder)
    try:
        db, is_whole = open_ledger(folder)
        if not is_whole:
            text.problems.append("the folder is not writable, so the newest samples may be missing")
        try:
            check_schema(db, folder)
            where, values = _condition(choice)
            _check_there(db, choice, folder)
            (num_stored,) = db.execute("SELECT COUNT(*) FROM samples").fetchone()
            counted = f"SELECT COUNT(*) FROM samples JOIN groups USING (group_id) {where}"
            (num_matching,) = db.execute(counted, values).fetchone()
            query = (
                f"SELECT {SAMPLE_COLUMNS} FROM samples JOIN groups USING (group_id) {where} "
                f"ORDER BY {_ORDERS[choice.order]}"
            )
            if choice.limit is not None and not choice.grep:
                query += f" LIMIT {choice.limit}"
            samples = _taken(samples_of(db.execute(query, values), folder, text), choice)
        finally:
            db.close()
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"the file cannot be read ({error})",
            where=str(folder.ledger),
            remedy="restore the file from a backup; otherwise the run cannot be continued",
        ) from error
    return Found(samples, num_matching, num_stored, list(text.problems))


def _taken(samples: Iterator[Sample], choice: Choice) -> list[Sample]:
    needle = choice.grep.casefold()
    taken: list[Sample] = []
    for sample in samples:
        if choice.limit is not None and len(taken) >= choice.limit:
            break
        if not needle or any(needle in text.casefold() for text in sample.texts):
            taken.append(sample)
    return taken


def _condition(choice: Choice) -> tuple[str, list[Any]]:
    parts, values = [], []
    if choice.step is not None:
        parts.append("groups.fate = 'consumed' AND groups.step = ?")
        values.append(choice.step)
    if choice.group is not None:
        parts.append("group_id = ?")
        values.append(choice.group)
    if choice.order in ("worst", "best"):
        parts.append("value IS NOT NULL")
    return (f"WHERE {' AND '.join(parts)}" if parts else ""), values


def _check_there(db: sqlite3.Connection, choice: Choice, folder: RunFolder) -> None:
    """Raise UserError if the step or group does not exist."""
    if choice.step is not None:
        low, high = db.execute("SELECT MIN(step), MAX(step) FROM groups WHERE fate = 'consumed'").fetchone()
        if low is None or not low <= choice.step <= high:
            has = f"the run has steps {low} to {high}" if low is not None else "no step has used a sample yet"
            raise UserError(f"there is no step {choice.step}", where=folder.name, remedy=has)
    if choice.group is not None:
        (high,) = db.execute("SELECT MAX(group_id) FROM groups").fetchone()
        if high is None or not 0 <= choice.group <= high:
            has = f"the run has groups 0 to {high}" if high is not None else "no group has been drawn yet"
            raise UserError(f"there is no group {choice.group}", where=folder.name, remedy=has)


def samples_of(rows: sqlite3.Cursor, folder: RunFolder, text: TokenText) -> Iterator[Sample]:
    place = folder.root / SEGMENT_FOLDER
    store = SegmentStore(place, segment_bytes=1, fsync=False) if place.is_dir() else None
    try:
        words = Texts.to_show(folder.root)
        for row in rows:
            yield _sample(row, store, text, words)
    finally:
        if store is not None:
            store.close()


def _sample(row: Sequence[Any], store: SegmentStore | None, text: TokenText, words: Texts) -> Sample:
    (
        group_id,
        index,
        num_tokens,
        first,
        last,
        verdict,
        value,
        is_kept,
        worker,
        facts,
        *place,
        fate,
        reason,
        step,
        floor,
    ) = row
    recorded = json.loads(facts)
    payload: Payload = "purged" if place[0] is None else "damaged"
    prompt, answer = "", ""
    pieces: list[tuple[int, str]] = []
    episode: tuple[TrajectoryText, ...] = ()
    if place[0] is not None and store is not None:
        try:
            trajectories, response = unpack_sample(store.read(Location(*place)))
            prompt, answer, pieces = text.texts(trajectories[0], response)
            episode = text.episode(trajectories)
            payload = "stored"
        except (LedgerError, ValueError):
            if not store.path(place[0]).exists():  # purged by the run during the read
                payload = "purged"
    is_used = fate == "consumed" and step is not None
    return Sample(
        group_id=group_id,
        sample_index=index,
        step=step if is_used else None,
        fate=fate,
        fate_reason=reason,
        verdict=verdict,
        reward=value,
        components={str(key): float(part) for key, part in (recorded.get("components") or {}).items()},
        verdict_reason=words.opened("reason", str(recorded.get("reason") or "")),
        policy=str(recorded.get("policy") or ""),
        is_kept=bool(is_kept),
        staleness=step - 1 - floor if is_used else None,
        first_version=first,
        last_version=last,
        num_tokens=num_tokens,
        finish_reason=str(recorded.get("finish_reason") or ""),
        worker=worker,
        timings=dict(recorded.get("timings") or {}),
        payload=payload,
        prompt=prompt,
        answer=answer,
        pieces=pieces,
        num_turns=int(recorded.get("turns") or 1),
        num_trajectories=int(recorded.get("trajectories") or 1),
        trajectories=episode,
    )
