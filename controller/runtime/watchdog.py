"""`owned-waits` for the whole run: if it makes no progress, it ends with a message about the current waits.

Has two deadlines: for any progress, and for a requested stop. Progress is only compared, not interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.errors import DeadlineExceeded


class Watchdog:
    """Checked on every tick. Times in seconds of the caller's clock."""

    def __init__(self, *, stall_after_s: float, stop_grace_s: float, now_s: float) -> None:
        self._stall_after_s, self._stop_grace_s = stall_after_s, stop_grace_s
        self._progress: object = None
        self._moved_s = now_s
        self._is_stalling = False
        self._stop_due_s: float | None = None

    def stop_requested(self, now_s: float) -> None:
        """Start the deadline of the current step and its checkpoint after a requested stop."""
        if self._stop_due_s is None:
            self._stop_due_s = now_s + self._stop_grace_s

    def look(self, now_s: float, progress: object, waits: Sequence[str]) -> str:
        """Return a warning, once per stall, when half of the limit has passed; else an empty text. Raises
        DeadlineExceeded.

        progress: a value that changes whenever something useful happened.
        """
        words = "; ".join(waits) or "no reason reported"
        if self._stop_due_s is not None and now_s > self._stop_due_s:
            raise DeadlineExceeded(f"the current step and its checkpoint ({words})", "the trainer", self._stop_grace_s)
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
