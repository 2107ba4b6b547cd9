"""Recorded answers as what an engine is asked to draw again, and their comparison with what it drew. Pure.

Shape legend: T tokens of a trajectory, N tokens that one version sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from areal_like.regenerate_files import INTEGERS, REALS, WIDE_REALS, AnswerSpan, Regenerated
from areal_like.trajectory import Trajectory

UNKNOWN = -1
"""Turn of an answer whose number is not recorded."""


class Place(NamedTuple):
    """A trajectory in the record, by the step that trained on it first. trajectory: 0 for the main one of a sample."""

    step: int
    group: int
    sample: int
    trajectory: int


class Tolerances(NamedTuple):
    """Largest difference of a log-prob, in nats; and of a random number from the range in which it gives the recorded
    token, as a probability.
    """

    nats: float
    probability: float


class Difference(NamedTuple):
    """A recorded token, log-prob or end that the engine does not give. `token`: its number in the answer, from 1."""

    place: Place
    position: int
    """In the trajectory."""
    turn: int
    token: int
    version: int
    kind: str
    recorded: Any
    found: Any

    @property
    def words(self) -> str:
        """The difference as text."""
        where = f"step {self.place.step}: group {self.place.group} sample {self.place.sample}"
        if self.place.trajectory:
            where += f" trajectory {self.place.trajectory + 1}"
        where += f", turn {'unknown' if self.turn == UNKNOWN else self.turn}"
        if self.kind == "end":
            return f"{where} (version {self.version}): {self.found}"
        where += f", token {self.token} (version {self.version})"
        if self.kind == "token":
            return f"{where}: the recorded token is {self.recorded}, but the engine draws {self.found}"
        return f"{where}: the recorded log-prob is {self.recorded:.6f}, but the engine computes {self.found:.6f}"

    def facts(self) -> dict[str, Any]:
        """The difference as JSON values."""
        return {
            **self.place._asdict(), "turn": None if self.turn == UNKNOWN else self.turn, "token": self.token,
            "version": self.version, "kind": self.kind, "recorded": self.recorded, "found": self.found,
        }  # fmt: skip


@dataclass
class Comparison:
    """Counts over all compared tokens, and the first difference in the order of the record."""

    num_tokens: int = 0
    num_drawn: int = 0
    """Tokens that were drawn again; of the others only log-probs are compared."""
    num_ties: int = 0
    num_other_tokens: int = 0
    num_other_logprobs: int = 0
    num_other_ends: int = 0
    largest_gap_nats: float = 0.0
    """Of tokens that do not differ."""
    largest_tie: float = 0.0
    first: Difference | None = None
    places: set[tuple[int, int]] = field(default_factory=set)
    """Group and sample of everything that was compared."""

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference other than ties."""
        return self.first is None

    def add(
        self, place: Place, trajectory: Trajectory, version: int, spans: Sequence[AnswerSpan], found: Regenerated,
        allowed: Tolerances, *, can_redraw: bool,
    ) -> None:  # fmt: skip
        """Compare the tokens of some spans of a trajectory with a result."""
        self.places.add((place.group, place.sample))
        offsets = np.concatenate([np.arange(span.length) for span in spans])
        lengths = [span.length for span in spans]
        positions_N = np.repeat([span.start for span in spans], lengths) + offsets
        numbers_N = np.repeat([span.position for span in spans], lengths) + offsets + 1
        turns_N = np.repeat([span.turn for span in spans], lengths)
        tokens_N, logprobs_N = trajectory.tokens_T[positions_N], trajectory.logprobs_T[positions_N]
        computed_N = np.frombuffer(found.logprobs_N, REALS)
        drawn_N, margins_N = np.frombuffer(found.drawn_N, INTEGERS), np.frombuffer(found.margins_N, WIDE_REALS)
        is_drawn = (turns_N != UNKNOWN) & can_redraw
        is_other = is_drawn & (margins_N > allowed.probability)
        is_tie = is_drawn & (margins_N <= allowed.probability) & (drawn_N != tokens_N)
        gaps_N = np.abs(computed_N.astype(np.float64) - logprobs_N)
        is_far = ~(gaps_N <= allowed.nats)
        self.num_tokens += len(tokens_N)
        self.num_drawn += int(is_drawn.sum())
        self.num_ties += int(is_tie.sum())
        self.num_other_tokens += int(is_other.sum())
        self.num_other_logprobs += int(is_far.sum())
        self.largest_gap_nats = max(self.largest_gap_nats, float(gaps_N[~is_far].max(initial=0.0)))
        self.largest_tie = max(self.largest_tie, float(margins_N[is_tie].max(initial=0.0)))
        for place_N in np.flatnonzero(is_other | is_far)[:1].tolist():
            kind = "token" if is_other[place_N] else "log-prob"
            pair = (
                (int(tokens_N[place_N]), int(drawn_N[place_N]))
                if is_other[place_N]
                else (float(logprobs_N[place_N]), float(computed_N[place_N]))
            )
            self._note(Difference(
                place, int(positions_N[place_N]), int(turns_N[place_N]), int(numbers_N[place_N]), version, kind, *pair,
            ))  # fmt: skip
        if found.end:
            self.num_other_ends += 1
            last = len(trajectory) - 1
            self._note(Difference(
                place, last, int(turns_N[-1]), int(numbers_N[-1]), version, "end", trajectory.finish_reason, found.end,
            ))  # fmt: skip

    def _note(self, one: Difference) -> None:
        if self.first is None or (one.place, one.position) < (self.first.place, self.first.position):
            self.first = one


def spans_of(trajectory: Trajectory, version: int, *, has_one_answer: bool) -> tuple[AnswerSpan, ...]:
    """Tokens that a version sampled, by answer.

    has_one_answer: a trajectory without numbers of answers is the first answer of its sample. Otherwise the turn of
    such an answer is UNKNOWN.
    """
    places_R = np.flatnonzero(trajectory.loss_mask_T)
    if trajectory.answer_ends_A is not None and trajectory.answer_ids_A is not None:
        ends, turns = trajectory.answer_ends_A.tolist(), trajectory.answer_ids_A.tolist()
    else:
        ends = [*(np.flatnonzero(np.diff(places_R) > 1) + 1).tolist(), len(places_R)]
        turns = [0 if has_one_answer and len(ends) == 1 else UNKNOWN] * len(ends)
    spans, done = [], 0
    for end, turn in zip(ends, turns, strict=True):
        answer_R = places_R[done:end]
        chosen = np.flatnonzero(trajectory.versions_T[answer_R] == version)
        if len(chosen):
            first, is_whole = int(chosen[0]), int(answer_R[-1]) - int(answer_R[0]) + 1 == len(answer_R)
            if is_whole:
                spans.append(AnswerSpan(turn=turn, start=int(answer_R[first]), position=first, length=len(chosen)))
            else:  # an answer with given tokens in it has no known positions in the stream
                spans += _runs(answer_R[chosen], first)
        done = end
    return tuple(spans)


def _runs(places: np.ndarray, first: int) -> list[AnswerSpan]:
    """Consecutive places, as spans of an unknown turn."""
    starts = [0, *(np.flatnonzero(np.diff(places) > 1) + 1).tolist(), len(places)]
    return [
        AnswerSpan(turn=UNKNOWN, start=int(places[start]), position=first + start, length=end - start)
        for start, end in itertools.pairwise(starts)
    ]
