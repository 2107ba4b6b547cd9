"""The current activity of the trainer, for heartbeats and the timeline.

It records the state, the busy and waiting times, and counts of micro-batches, refused batches and checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from areal_like.trace import MAIN_LANE, Tracer, arrow_name
from areal_like.wire.messages import Heartbeat

WAIT = "wait:"
"""States with this prefix count as waiting, all others as work."""
BETWEEN = "start"
"""The state between two states; it is not drawn."""
ARRIVAL_S = 1e-6
"""Offset from the start of a step at which its samples' arrows end, before anything inside it begins."""


class Activity:
    """The trainer's current state. Set on the event loop; spans may come from any thread."""

    def __init__(self, tracer: Tracer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer, self._clock = tracer, clock
        self._state, self._since_s = BETWEEN, clock()
        self._args: dict[str, Any] = {}
        self._drawn_s = self._now_s()
        self._spent_s = {"busy_s": 0.0, "wait_s": 0.0}
        self._lock = threading.Lock()
        self.num_micro_batches = 0
        self.num_refused = 0
        """Batches that were not the requested one."""
        self.num_checkpoints = self.num_failed_checkpoints = self.num_put_off_checkpoints = 0
        """Complete on disk; failed to be written; postponed because the previous one was still being written."""

    @contextlib.contextmanager
    def state(self, name: str, **args: Any) -> Iterator[None]:
        """Set the state while the enclosed code runs, and restore the previous one afterwards.

        States are drawn one after the other: a nested state splits the outer one in two.
        """
        before = self._switch(name, args)
        try:
            yield
        finally:
            self._switch(*before)

    @contextlib.contextmanager
    def span(self, name: str, lane: str = MAIN_LANE, **args: Any) -> Iterator[None]:
        """Record a slice inside a state: a micro-batch, an update, packing in the background."""
        start_s = self._now_s()
        try:
            yield
        finally:
            if name == "micro_batch":
                self.num_micro_batches += 1
                lane = "micro-batches"
            if self._tracer:
                self._tracer.complete(name, start_s, self._now_s(), lane, **args)

    def arrive(self, samples: Iterable[tuple[int, int]]) -> None:
        """End the arrows of these samples, as (group, index), at the current state."""
        if self._tracer:
            for group_id, sample_index in samples:
                if self._tracer.draws(group_id):
                    self._tracer.arrow_end(arrow_name(group_id, sample_index), self._drawn_s + ARRIVAL_S)

    def times(self) -> dict[str, float]:
        """Return busy_s and wait_s so far, including the current state."""
        with self._lock:
            spent = dict(self._spent_s)
            spent[self._account()] += self._clock() - self._since_s
        return spent

    def heartbeat(self, counters: dict[str, float]) -> Heartbeat:
        """Return the heartbeat for the hub."""
        own = {
            "micro_batches": float(self.num_micro_batches),
            "refused_batches": float(self.num_refused),
            "checkpoints": float(self.num_checkpoints),
            "failed_checkpoints": float(self.num_failed_checkpoints),
            "put_off_checkpoints": float(self.num_put_off_checkpoints),
            "cpu_s": time.process_time(),
        }
        return Heartbeat(state=self._state, counters={**counters, **self.times(), **own})

    def _account(self) -> str:
        return "wait_s" if self._state.startswith(WAIT) else "busy_s"

    def _now_s(self) -> float:
        return self._tracer.now_s() if self._tracer else 0.0

    def _switch(self, name: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        with self._lock:
            now_s = self._clock()
            self._spent_s[self._account()] += now_s - self._since_s
            before = (self._state, self._args)
            self._state, self._args, self._since_s = name, args, now_s
        start_s, self._drawn_s = self._drawn_s, self._now_s()
        if self._tracer and before[0] != BETWEEN:
            self._tracer.complete(before[0], start_s, self._drawn_s, **before[1])
        return before
