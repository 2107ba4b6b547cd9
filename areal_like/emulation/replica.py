"""One simulated rollout worker: answers that advance together at a rate that depends on their number.

How long a decode step takes is computed in roofline.py.

All active answers gain one token per decode step, so one token counter serves them all: an answer that has no token at
count a and will have n tokens ends at count a + n. The rate changes when the batch changes, and, because the cache
grows, at least every `stride_tokens`. In between, the rate at the middle of the interval is used, which is exact if the
time of a step grows linearly with the cache. So everything up to the next external event (a sequence has ended, a
waiting one may start, the cache is full) is one table of intervals, computed once (`_look_ahead`); `advance` only reads
it.

When the cache is full, the sequences with the fewest tokens return to the waiting queue. They keep their tokens and are
prefilled again later, as in SGLang (its scheduler calls this retraction).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from areal_like.emulation.roofline import Costs

MAX_STRIDE_TOKENS = 512.0
EPSILON = 1e-6
RESERVED_TOKENS = 512
"""Tokens that each answer must have room for before another one starts, and after some were retracted."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer being generated, or several to one prompt that start together."""

    lease_id: int
    prompt: int
    lengths: Ordered[int]
    """Final lengths of the answers in tokens, ascending."""
    numbers: Ordered[int] = (1,)
    """Number of answers of each length."""
    ready: int = 0
    """Tokens that each answer already has from another worker; they are prefilled."""
    shared: int = 0
    """Tokens of the prompt that another sequence has already prefilled."""
    origin: float = math.inf
    """The worker's token counter at which the sequence had no token; infinite while it waits."""
    held: float = 0.0
    """Tokens of each answer in the cache, minus the token counter."""
    done: int = 0
    """Number of lengths whose answers had ended when the sequence was last retracted."""

    def number_from(self, index: int) -> int:
        """Number of answers that have not ended while those of `lengths[index]` are next to end."""
        return sum(self.numbers[index:])


Entry = tuple[float, int, Sequence, int]
"""Count at which answers of a sequence end next, a serial number, the sequence, and the index of their length."""


class Replica:
    """Advances only on request (`advance`); `wake_s` is the time at which that is next due."""

    def __init__(
        self, name: str, costs: Costs, max_sequences: int, *, grid_tokens: int = 0, cache_tokens: float = math.inf,
        stride_tokens: float = MAX_STRIDE_TOKENS,
    ) -> None:  # fmt: skip
        """max_sequences: answers decoded at once. grid_tokens: start counts of sequences are rounded to multiples of
        this number, so that several answers end together if lengths are multiples too; 0: no rounding.

        cache_tokens: largest number of tokens of prompts and answers held at once; infinite: only max_sequences limits.
        """
        self.name, self._costs, self._max_sequences = name, costs, max_sequences
        self._grid_tokens, self._cache_tokens, self._stride_tokens = grid_tokens, cache_tokens, stride_tokens
        self.now_s = 0.0
        self.version = -1
        self.busy_s = self.paused_s = self.prefill_s = self.idle_s = 0.0
        self.tokens = self.steps = 0.0
        self.wake_s = math.inf
        """Time at which an answer ends or the batch must be checked; infinite while nothing runs. Call `refill`
        before.
        """
        self.is_admitting = True
        self._count = 0.0
        """Tokens that every active answer has gained since the worker's start."""
        self._debt_s = 0.0
        """Seconds of prefill that decoding waits for."""
        self._paused_until_s = -1.0
        self._active: list[Entry] = []
        """Heap, in its state at the beginning of `_stretches`."""
        self._number = 0
        """Number of answers in `_active`."""
        self._held = 0.0
        """The sum of their `held`."""
        self._waiting: deque[Sequence] = deque()
        self._serial = 0
        self._stretches: list[tuple[float, float, int, float]] = []
        """Future intervals: end count, seconds per step, number of answers, sum of their `held`."""
        self._place = 0
        """Index of the current interval; past the last one, `take_ended` returns sequences."""
        self._left_s = 0.0
        """Seconds of decoding until the end of the intervals."""
        self._then: tuple[list[Entry], int, float] = ([], 0, 0.0)
        """`_active`, `_number` and `_held` before the answers that end there are removed."""
        self._is_planned = False
        """The intervals are valid."""
        self._is_news = False
        """A sequence was added, removed or ended since the intervals were computed."""
        self._stops_at_ends = False
        """A sequence was waiting when the intervals were computed."""

    @property
    def num_active(self) -> int:
        """Number of answers in the batch."""
        return self._batch()[0]

    @property
    def context_tokens(self) -> float:
        """Tokens in the cache."""
        number, held = self._batch()
        return held + number * self._count

    def _batch(self) -> tuple[int, float]:
        """Number of answers that run now, and the sum of their `held`."""
        if not self._is_planned:
            return self._number, self._held
        return self._stretches[self._place][2:] if self._place < len(self._stretches) else self._then[1:]

    @property
    def active(self) -> list[Sequence]:
        """Sequences in the batch, in no particular order."""
        return [sequence for _, _, sequence, _ in self._active]

    def add(self, sequence: Sequence) -> None:
        """Add a sequence; it starts when there is room. Call `advance` first."""
        self._waiting.append(sequence)
        self._is_news = True

    # ------------------------------------------------------------ time

    def advance(self, now_s: float) -> None:
        """Advance to `now_s`. Nothing ends before `wake_s`."""
        began_s, self.now_s = self.now_s, now_s
        elapsed_s = now_s - began_s
        is_due = now_s >= self.wake_s
        if elapsed_s <= 0 and not is_due:
            return
        if self._paused_until_s > began_s:
            paused_s = min(elapsed_s, self._paused_until_s - began_s)
            self.paused_s += paused_s
            elapsed_s -= paused_s
        if not self._active:
            self.idle_s += elapsed_s
            return
        if self._debt_s:
            prefill_s = min(elapsed_s, self._debt_s)
            self._debt_s -= prefill_s
            self.prefill_s += prefill_s
            elapsed_s -= prefill_s
        self.busy_s += elapsed_s
        self._left_s -= elapsed_s
        stretches, place, count = self._stretches, self._place, self._count
        while place < len(stretches) and self._is_planned:
            until, step_s, number, _ = stretches[place]
            steps = until - count
            if not is_due and steps * step_s > elapsed_s:
                steps = elapsed_s / step_s
                self._count = count + steps
                self.steps += steps
                self.tokens += steps * number
                break
            elapsed_s -= steps * step_s
            self.steps += steps
            self.tokens += steps * number
            self._count = count = until
            place += 1
        self._place = place

    def take_ended(self) -> list[Sequence]:
        """Remove and return the sequences whose last token has been generated."""
        if not self._is_planned or self._place < len(self._stretches):
            return []
        self._active, self._number, self._held = self._then
        self._is_planned, self._is_news = False, True
        ended: list[Sequence] = []
        self._pop(ended)
        return ended

    def _pop(self, ended: list[Sequence] | None) -> None:
        """Remove answers that have ended. With None, finished sequences stay until `take_ended` collects them."""
        active, last = self._active, self._count + EPSILON
        while active and active[0][0] <= last:
            _, serial, sequence, index = active[0]
            if index + 1 < len(sequence.lengths):
                heapq.heapreplace(active, (sequence.origin + sequence.lengths[index + 1], serial, sequence, index + 1))
            elif ended is None:
                return
            else:
                heapq.heappop(active)
                ended.append(sequence)
            number = sequence.numbers[index]
            self._number -= number
            self._held -= number * sequence.held

    def _settle(self) -> None:
        """Update the heap to the current time, within the intervals."""
        if self._is_planned:
            self._is_planned, self._is_news = False, True
            self._pop(None)

    # ------------------------------------------------------------ the batch

    def refill(self) -> list[Sequence]:
        """Start waiting sequences as far as slots and cache allow, compute the next intervals, and return the started
        sequences."""
        is_stopping = bool(self._waiting) and self.is_admitting
        is_due = self._is_planned and self._place == len(self._stretches)
        if not self._is_news and not is_due and self._stops_at_ends == is_stopping:
            return []
        self._settle()
        self._is_news = False
        started: list[Sequence] = []
        if self._held + self._number * self._count > self._cache_tokens:
            self._make_room()
        if self._waiting and self.is_admitting:
            prefilled = 0
            while self._waiting and self._has_room(self._waiting[0]):
                sequence = self._waiting.popleft()
                prefilled += self._start(sequence)
                started.append(sequence)
            if prefilled:
                self._debt_s += self._costs.prefill_s(prefilled)
        self._look_ahead()
        return started

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether slots and cache have room for the sequence and some growth of all; a single sequence always has
        room.
        """
        if not self._number:
            return True
        number = sequence.number_from(sequence.done)
        together = self._number + number
        if together > self._max_sequences:
            return False
        held = self._held + self._number * self._count + number * (sequence.prompt + sequence.ready)
        return held + RESERVED_TOKENS * together <= self._cache_tokens

    def _start(self, sequence: Sequence) -> int:
        """Start a sequence and return the number of tokens to prefill."""
        number, count, grid = sequence.number_from(sequence.done), self._count, self._grid_tokens
        origin = count - sequence.ready
        sequence.origin = round(origin / grid) * float(grid) if grid else origin
        sequence.held = sequence.prompt + sequence.ready - count
        self._serial += 1
        end = sequence.origin + sequence.lengths[sequence.done]
        heapq.heappush(self._active, (end, self._serial, sequence, sequence.done))
        self._number += number
        self._held += number * sequence.held
        return number * (sequence.prompt - sequence.shared + sequence.ready)

    def _make_room(self) -> None:
        """Retract the sequence with the fewest tokens until the others have room to grow."""
        stay = sorted(self._active, key=lambda entry: (entry[2].origin, entry[1]))
        while len(stay) > 1:
            if self._held + self._number * (self._count + RESERVED_TOKENS) <= self._cache_tokens:
                break
            _, _, sequence, index = stay.pop()
            self._send_back(sequence, index)
            self._waiting.appendleft(sequence)
        heapq.heapify(stay)
        self._active = stay

    def _send_back(self, sequence: Sequence, index: int) -> None:
        number = sequence.number_from(index)
        self._number -= number
        self._held -= number * sequence.held
        sequence.ready = int(self.tokens_of(sequence))
        sequence.shared, sequence.origin, sequence.done = 0, math.inf, index

    def _look_ahead(self) -> None:
        """Compute the intervals up to the next external event, and its time."""
        active, number, held, count = self._active, self._number, self._held, self._count
        self._stops_at_ends = is_stopping = bool(self._waiting) and self.is_admitting
        stretches: list[tuple[float, float, int, float]] = []
        decode_s, stride, cache = self._costs.decode_s, self._stride_tokens, self._cache_tokens
        left_s, is_copy = 0.0, False
        while active:
            end, serial, sequence, index = active[0]
            is_full = False
            while count < end - EPSILON and not is_full:
                until = end if end - count <= stride else count + stride
                if len(active) > 1 and held + number * until > cache + number:
                    until, is_full = max(count + 1.0, (cache - held) / number + 1.0), True
                step_s = decode_s(number, held + number * (count + until) / 2)
                stretches.append((until, step_s, number, held))
                left_s += (until - count) * step_s
                count = until
            index += 1
            if is_full or is_stopping or index == len(sequence.lengths):
                break
            if not is_copy:
                active, is_copy = active.copy(), True
            heapq.heapreplace(active, (sequence.origin + sequence.lengths[index], serial, sequence, index))
            ended = sequence.numbers[index - 1]
            number -= ended
            held -= ended * sequence.held
        self._stretches, self._place, self._left_s = stretches, 0, left_s
        self._is_planned = bool(active)
        self._then = active, number, held
        self._due()

    def _due(self) -> None:
        """Set `wake_s`."""
        if not self._active:
            self.wake_s = math.inf
        else:
            self.wake_s = max(self.now_s, self._paused_until_s) + self._debt_s + max(0.0, self._left_s)

    def tokens_of(self, sequence: Sequence) -> float:
        """Tokens of its longest answer so far, including `ready` ones."""
        return min(float(sequence.lengths[-1]), max(float(sequence.ready), self._count - sequence.origin))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or active. Call `advance` before and `refill` after."""
        self._settle()
        self._is_news = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        for place, (_, _, active, index) in enumerate(self._active):
            if active is sequence:
                number = sequence.number_from(index)
                self._number -= number
                self._held -= number * sequence.held
                del self._active[place]
                heapq.heapify(self._active)
                return

    # ------------------------------------------------------------ pauses

    def swap(self, pause_s: float, *, is_recomputing: bool) -> None:
        """Swap weights: pause for `pause_s`, then prefill every running sequence again."""
        self._paused_until_s = max(self._paused_until_s, self.now_s + pause_s)
        if is_recomputing and self._active:
            self._debt_s += self._costs.prefill_s(self.context_tokens)
        self._due()
