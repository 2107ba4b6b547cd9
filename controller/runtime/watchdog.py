"""`owned-waits` for the whole run: it gets on, or it ends with words that say who waits for whom.

Owns: two deadlines, of any progress and of an end that was asked for. Refuses: knowing what progress is (it compares),
ending anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.errors import DeadlineExceeded


class Watchdog:
    """Looked at on every tick. Times in seconds of the caller's clock."""

    def __init__(self, *, stall_after_s: float, stop_grace_s: float, now_s: float) -> None:
        self._stall_after_s, self._stop_grace_s = stall_after_s, stop_grace_s
        self._progress: object = None
        self._moved_s = now_s
        self._is_stalling = False
        self._stop_due_s: float | None = None

    def stop_requested(self, now_s: float) -> None:
        """The running step and its checkpoint are due within the grace from now."""
        if self._stop_due_s is None:
            self._stop_due_s = now_s + self._stop_grace_s

    def look(self, now_s: float, progress: object, waits: Sequence[str]) -> str:
        """A warning, once per stall, when half of the patience is gone; else nothing. Raises DeadlineExceeded.

        progress: anything that differs from the last look's as soon as something useful happened.
        """
        words = "; ".join(waits) or "no reason reported"
        if self._stop_due_s is not None and now_s > self._stop_due_s:
            raise DeadlineExceeded(f"the running step and its checkpoint ({words})", "the trainer", self._stop_grace_s)
        if progress != self._progress:
            self._progress, self._moved_s, self._is_stalling = progress, now_s, False
            return ""
        idle_s = now_s - self._moved_s
        if idle_s > self._stall_after_s:
            raise DeadlineExceeded(f"any progress ({words})", "the processes named", self._stall_after_s)
        if idle_s > self._stall_after_s / 2 and not self._is_stalling:
            self._is_stalling = True
            return f"no progress for {idle_s:.0f} s: {words}"
        return ""
