"""Finds an engine thread that hangs; see docs/decisions/0146-engine-that-hangs.md."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

POLL_S = 1.0


class TurnWatch:
    """Compares the number of turns of a thread in a second thread.

    Args:
        limit_s: time without a turn after which the thread counts as hung. It is counted in polls, so the time in which
            the whole process is suspended does not count.
        hung: called once with the reason, in the watch's thread, after the stacks of all threads went to stderr.
        poll_s: time between two polls.
    """

    def __init__(self, limit_s: float, hung: Callable[[str], None], *, poll_s: float = POLL_S) -> None:
        self._limit_s, self._hung, self._poll_s = limit_s, hung, poll_s
        self._num_turns = 0
        self._is_excused = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turn-watch", daemon=True)

    def start(self) -> None:
        """Start to poll."""
        self._thread.start()

    def close(self) -> None:
        """Stop to poll. Safe to call twice, and before `start`."""
        self._closed.set()

    def turn(self) -> None:
        """Record a turn, or a part of one that takes long. Called by the watched thread."""
        self._num_turns += 1

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """In the body, no turn is expected: what it waits for has its own deadline."""
        self._is_excused = True
        try:
            yield
        finally:
            self._num_turns += 1
            self._is_excused = False

    def _watch(self) -> None:
        seen, silent_s = self._num_turns, 0.0
        while not self._closed.wait(self._poll_s):
            newest = self._num_turns
            silent_s = silent_s + self._poll_s if newest == seen and not self._is_excused else 0.0
            seen = newest
            if silent_s >= self._limit_s:
                reason = f"the engine thread has made no progress for {silent_s:.0f} s"
                log.error("%s; the stacks of all threads follow", reason)
                with contextlib.suppress(OSError, ValueError):  # stderr without a file descriptor
                    faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._hung(reason)
                return
