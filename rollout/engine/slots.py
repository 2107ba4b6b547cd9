"""Records of all running answers on the host: tokens, log-probs, versions and limits, as arrays over rows.

It assigns answers to rows, records steps, finds finished rows, and returns segments. It does not import torch.

A *row* is a position in the decoder's cache; active rows are always 0..count-1 after `compaction`, so an answer's row
changes when others end or are reordered. A *slot* is the index of an answer's record; it does not change while the
answer runs, so moving a row copies no record. All data of a token is stored at its absolute position (prompt first),
which is also its position in the cache.

Legend: S slots, C context, B active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_like.trajectory import Segment
from rollout.engine.adapter_layout import BASE
from rollout.engine.port import EndReason, GenerationRequest
from rollout.engine.sampler import uniforms


@dataclass(eq=False)
class Answer:
    """One request from submission to its end. `ticket` identifies it inside the engine; positions are absolute."""

    ticket: int
    request: GenerationRequest
    stop_ids: np.ndarray
    submitted_s: float
    row: int = field(init=False)
    slot: int = field(init=False)
    admitted_s: float = field(init=False)
    paused_before_s: float = field(init=False)
    adapter: int = BASE
    """Number of its adapter in the decoder."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first position, version): tokens from there on were sampled under that version."""
    is_stopped: bool = False
    """Its newest token completed a stop string."""

    @property
    def start(self) -> int:
        """Position of the first new token."""
        return len(self.request.prompt_P) + len(self.request.prefix)

    def known_tokens(self) -> np.ndarray:
        """int32: prompt and prefix."""
        return np.concatenate((self.request.prompt_P, self.request.prefix.tokens_R))


class Slots:
    """Records of up to `num_slots` running answers."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.num_slots, self.max_context = num_slots, max_context
        self.count = 0
        self.answers: list[Answer | None] = [None] * num_slots
        # Per slot. Untouched pages of these cost no memory.
        self._tokens = np.empty((num_slots, max_context), np.int32)
        self._logprobs = np.empty((num_slots, max_context), np.float32)
        self._uniforms = np.empty((num_slots, max_context), np.float64)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_with_strings = 0
        """Running answers with stop strings."""
        # Per row.
        self._slot_of_row = np.zeros(num_slots, np.int64)
        self._next_token = np.zeros(num_slots, np.int64)
        self._position = np.zeros(num_slots, np.int64)
        self._last_position = np.zeros(num_slots, np.int64)
        self._stop_ids = np.full((num_slots, 1), -1, np.int64)
        self._adapter = np.full(num_slots, BASE, np.int64)

    @property
    def num_running(self) -> int:
        """Number of answers in rows."""
        return self.num_slots - len(self._free_slots)

    @property
    def tokens_B(self) -> np.ndarray:
        """int64: the newest token of each row, the input of the next step."""
        return self._next_token[: self.count]

    @property
    def positions_B(self) -> np.ndarray:
        """int64: position of that token."""
        return self._position[: self.count]

    @property
    def adapters_B(self) -> np.ndarray:
        """int64: number of the adapter of each row, or BASE."""
        return self._adapter[: self.count]

    def uniforms_B(self) -> np.ndarray:
        """float64: the random number of the token each row samples next."""
        return self._uniforms[self._slot_of_row[: self.count], self.positions_B + 1]

    def running(self) -> list[Answer]:
        """Answers by row."""
        return [answer for answer in self.answers[: self.count] if answer is not None]

    def holes(self) -> list[int]:
        """Rows below `count` whose answer ended."""
        return [row for row in range(self.count) if self.answers[row] is None]

    def place(self, answer: Answer, row: int, version: int) -> None:
        """Put an answer into a free row; it is about to sample its first new token under `version`."""
        request, start = answer.request, answer.start
        answer.row, answer.slot = row, self._free_slots.pop()
        answer.spans = [(start, version)]
        self._num_with_strings += request.stops is not None
        self.answers[row] = answer
        self.count = max(self.count, row + 1)
        slot = answer.slot
        self._tokens[slot, :start] = answer.known_tokens()
        last = min(len(request.prompt_P) + request.sampling.max_new_tokens, self.max_context) - 1
        if request.segment_tokens:
            last = min(last, start + request.segment_tokens - 1)
        if request.sampling.temperature > 0:
            stream = uniforms(request.seed, len(request.prefix), last + 1 - start)
            self._uniforms[slot, start : last + 1] = stream
        else:
            self._uniforms[slot, start : last + 1] = 0.5
        self._slot_of_row[row] = slot
        self._next_token[row] = self._tokens[slot, start - 1]
        self._position[row], self._last_position[row], self._adapter[row] = start - 1, last, answer.adapter
        missing = len(answer.stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(answer.stop_ids)] = answer.stop_ids

    def record(self, tokens_B: np.ndarray, logprobs_B: np.ndarray) -> np.ndarray:
        """Append one token to every row; returns the rows that have ended."""
        count = self.count
        position = self._position[:count]
        position += 1
        slots = self._slot_of_row[:count]
        self._tokens[slots, position] = tokens_B
        self._logprobs[slots, position] = logprobs_B
        self._next_token[:count] = tokens_B
        has_ended = (tokens_B[:, None] == self._stop_ids[:count]).any(1)
        has_ended |= position >= self._last_position[:count]
        if self._num_with_strings:
            has_ended |= self._find_stop_strings()
        return np.flatnonzero(has_ended)

    def _find_stop_strings(self) -> np.ndarray:
        """bool per row: its newest token completed one."""
        found_B = np.zeros(self.count, bool)
        for row, answer in enumerate(self.answers[: self.count]):
            if answer is not None and answer.request.stops is not None:
                first, end = len(answer.request.prompt_P), int(self._position[row]) + 1
                start = max(first, end - answer.request.stops.num_tokens)
                answer.is_stopped = found_B[row] = answer.request.stops.is_end(self._tokens[answer.slot, start:end])
        return found_B

    def end_reason(self, row: int) -> EndReason:
        """Why a row that `record` returned has ended."""
        answer = self.answers[row]
        assert answer is not None
        if answer.is_stopped or self._next_token[row] in answer.stop_ids:
            return "stop"
        num_answer = int(self._position[row]) + 1 - len(answer.request.prompt_P)
        is_full = int(self._position[row]) + 1 >= self.max_context
        return "length" if is_full or num_answer >= answer.request.sampling.max_new_tokens else "segment"

    def segment(self, answer: Answer) -> Segment:
        """All new tokens of a running answer so far."""
        stop = int(self._position[answer.row]) + 1
        if len(answer.spans) == 1:  # nearly always, and this runs at the end of every turn
            versions = np.full(stop - answer.start, answer.spans[0][1], np.int32)
        else:
            starts = [start for start, _ in answer.spans] + [stop]
            versions = np.repeat([version for _, version in answer.spans], np.diff(starts)).astype(np.int32)
        return Segment(
            self._tokens[answer.slot, answer.start : stop].copy(),
            self._logprobs[answer.slot, answer.start : stop].copy(),
            versions,
        )

    def length(self, answer: Answer) -> int:
        """Number of tokens of a running answer, including prompt and newest token."""
        return int(self._position[answer.row]) + 1

    def context(self, answer: Answer) -> np.ndarray:
        """int32: tokens of a running answer that the cache must contain before its next step (all except the
        newest).
        """
        return self._tokens[answer.slot, : int(self._position[answer.row])].copy()

    def begin_version(self, version: int) -> None:
        """Record that tokens are sampled with `version` from now on."""
        for answer in self.running():
            answer.spans.append((int(self._position[answer.row]) + 1, version))

    def release(self, answer: Answer) -> None:
        """Free the row and the slot of an ended answer; the row is a hole until filled or compacted."""
        self.answers[answer.row] = None
        self._num_with_strings -= answer.request.stops is not None
        self._free_slots.append(answer.slot)

    def compaction(self) -> tuple[list[int], list[int]]:
        """Move the records of the last rows into holes; returns (rows moved, their new rows)."""
        holes = self.holes()
        count = self.count - len(holes)
        sources = [row for row in range(count, self.count) if self.answers[row] is not None]
        targets = [row for row in holes if row < count]
        self.move(sources, targets)
        self.count = count
        return sources, targets

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move the records of rows `sources` to rows `targets`, all at once; sources that are not targets are free
        afterwards."""
        for array in (
            self._slot_of_row, self._next_token, self._position, self._last_position, self._stop_ids, self._adapter,
        ):  # fmt: skip
            array[targets] = array[sources]
        moved = [self.answers[source] for source in sources]
        for source in sources:
            self.answers[source] = None
        for answer, target in zip(moved, targets, strict=True):
            assert answer is not None
            answer.row = target
            self.answers[target] = answer
