"""One simulated rollout worker: sequences that advance together at the rate their number allows.

Owns: the worker's own time: decoding, prefill, pauses; which answers end when. Refuses: leases and versions' meaning
(their owners), how long a decode step takes (roofline.py).

All active sequences gain one token a decode step, so one count of tokens serves them all: a sequence that started at
count a and has n tokens to go ends at count a + n. The rate changes when the batch does, and with the cache's growth at
least every `stride_tokens`; in between it is the one at the middle of the stretch, which is exact where a step's time
grows in proportion to the cache.

A cache that is full sends the sequences with the fewest tokens back to wait, where they keep their tokens and are
prefilled again later, as SGLang does (its scheduler calls it retraction).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from areal_like.emulation.roofline import Costs

MAX_STRIDE_TOKENS = 512.0
EPSILON = 1e-6
RESERVED_TOKENS = 512
"""Growth of each sequence that a full cache makes room for, before another one starts or after some were sent back."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer being generated."""

    lease_id: int
    prompt: int
    length: int
    """Tokens it will have."""
    ready: int = 0
    """Tokens it has already, from another worker: they are prefilled."""
    shared: int = 0
    """Of the prompt: tokens that another sequence has prefilled already."""
    end: float = math.inf
    """Count of the worker's tokens at which it ends; infinite while it waits."""


class Replica:
    """Moves only when told to (`advance`); `wake_s` says when that is next due."""

    def __init__(
        self, name: str, costs: Costs, max_sequences: int, *, grid_tokens: int = 0, cache_tokens: float = math.inf,
        stride_tokens: float = MAX_STRIDE_TOKENS,
    ) -> None:  # fmt: skip
        """grid_tokens: ends are rounded to multiples of so many tokens, so that several fall together; 0: exact.

        cache_tokens: prompts and answers held at once, at most; infinite: max_sequences is all that counts.
        """
        self.name, self._costs, self._max_sequences = name, costs, max_sequences
        self._grid_tokens, self._cache_tokens, self._stride_tokens = grid_tokens, cache_tokens, stride_tokens
        self.now_s = 0.0
        self.version = -1
        self.busy_s = self.paused_s = self.prefill_s = self.idle_s = 0.0
        self.tokens = self.steps = 0.0
        self._count = 0.0
        """Tokens every active sequence gained since the worker's start."""
        self._step_s = math.inf
        self._wake_count = math.inf
        """Count at which something ends, or the rate must be looked at again."""
        self._debt_s = 0.0
        """Prefill that decoding has to wait for."""
        self._paused_until_s = -1.0
        self._context = 0.0
        """Tokens in the cache, less active x count."""
        self._active: list[tuple[float, int, Sequence]] = []
        """Heap by the count at which each ends."""
        self._waiting: deque[Sequence] = deque()
        self._serial = 0
        self.is_admitting = True

    @property
    def num_active(self) -> int:
        """Sequences in the batch."""
        return len(self._active)

    @property
    def context_tokens(self) -> float:
        """Tokens in the cache."""
        return self._context + len(self._active) * self._count

    def add(self, sequence: Sequence) -> None:
        """Take a sequence; it starts when a slot is free. `advance` to now first."""
        self._waiting.append(sequence)

    def advance(self, now_s: float) -> None:
        """Let time pass up to `now_s`; nothing ends before `wake_s`."""
        began_s, self.now_s = self.now_s, now_s
        elapsed_s = now_s - began_s
        if elapsed_s <= 0:
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
        steps = elapsed_s / self._step_s
        self._count += steps
        self.steps += steps
        self.tokens += steps * len(self._active)

    def take_ended(self) -> list[Sequence]:
        """Sequences whose last token is out."""
        ended: list[Sequence] = []
        active, last = self._active, self._count + EPSILON
        while active and active[0][0] <= last:
            end, _, sequence = heapq.heappop(active)
            self._context -= sequence.prompt + sequence.length - end
            ended.append(sequence)
        return ended

    def refill(self) -> list[Sequence]:
        """Start what waits, as far as slots and cache go; returns what started. Reprices the decode step."""
        active, started = self._active, []
        if self._context + len(active) * self._count > self._cache_tokens:
            self._make_room()
        if self._waiting and self.is_admitting:
            prefilled = 0
            while self._waiting and len(active) < self._max_sequences and self._has_room(self._waiting[0]):
                sequence = self._waiting.popleft()
                self._serial += 1
                sequence.end = self._count + sequence.length - sequence.ready
                if self._grid_tokens:
                    sequence.end = max(1, round(sequence.end / self._grid_tokens)) * float(self._grid_tokens)
                heapq.heappush(active, (sequence.end, self._serial, sequence))
                self._context += sequence.prompt + sequence.ready - self._count
                prefilled += sequence.prompt - sequence.shared + sequence.ready
                started.append(sequence)
            if prefilled:
                self._debt_s += self._costs.prefill_s(prefilled)
        self._reprice()
        return started

    def _reprice(self) -> None:
        """How long a decode step takes from here to the next look."""
        number = len(self._active)
        if not number:
            self._step_s = self._wake_count = math.inf
            return
        context = self._context + number * self._count
        stretch = min(self._active[0][0] - self._count, self._stride_tokens)
        if number > 1 and self._cache_tokens < math.inf:
            stretch = min(stretch, max(1.0, (self._cache_tokens - context) / number + 1))
        self._wake_count = self._count + stretch
        self._step_s = self._costs.decode_s(number, context + max(0.0, stretch) * number / 2)

    def _has_room(self, sequence: Sequence) -> bool:
        """The cache holds it too, and some growth of all; what is alone always has room."""
        number = len(self._active)
        held = self._context + number * self._count + sequence.prompt + sequence.ready
        return not number or held + RESERVED_TOKENS * (number + 1) <= self._cache_tokens

    def _make_room(self) -> None:
        """Send back whoever has the fewest tokens, until the others can grow for a while."""
        by_tokens = sorted(self._active, key=lambda entry: -self.tokens_of(entry[2]))
        while len(by_tokens) > 1 and self.context_tokens + RESERVED_TOKENS * len(by_tokens) > self._cache_tokens:
            sequence = by_tokens.pop()[2]
            ready = int(self.tokens_of(sequence))
            self.remove(sequence)
            sequence.ready, sequence.shared, sequence.end = ready, 0, math.inf
            self._waiting.appendleft(sequence)

    @property
    def active(self) -> list[Sequence]:
        """The batch, in no order."""
        return [sequence for _, _, sequence in self._active]

    def tokens_of(self, sequence: Sequence) -> float:
        """Tokens it has by now, `ready` ones included."""
        if sequence.end == math.inf:
            return float(sequence.ready)
        return min(float(sequence.length), max(float(sequence.ready), sequence.length - (sequence.end - self._count)))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or active. `advance` before, `refill` after."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        for place, (end, _, active) in enumerate(self._active):
            if active is sequence:
                self._context -= sequence.prompt + sequence.length - end
                del self._active[place]
                heapq.heapify(self._active)
                return

    def hold(self, is_held: bool) -> None:
        """Stand still until told otherwise. `advance` to now before."""
        self._paused_until_s = math.inf if is_held else self.now_s

    def swap(self, pause_s: float, *, is_recomputing: bool) -> None:
        """New weights: stand still so long, then prefill every running sequence anew."""
        self._paused_until_s = max(self._paused_until_s, self.now_s + pause_s)
        if is_recomputing and self._active:
            self._debt_s += self._costs.prefill_s(self.context_tokens)

    @property
    def wake_s(self) -> float:
        """When something ends, or the rate must be looked at again; infinite while nothing runs. `refill` before."""
        if not self._active:
            return math.inf
        steps = self._wake_count - self._count
        return max(self.now_s, self._paused_until_s) + self._debt_s + (steps * self._step_s if steps > 0 else 0.0)
