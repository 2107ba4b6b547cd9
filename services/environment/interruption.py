"""A deadline for code that is not `async`: it is interrupted by a signal.

A signal does not stop code that hangs in a native library; then the service kills the process (pool.py). Signals are
delivered to the main thread only, in which an environment's methods run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

AGAIN_S = 0.1
"""Interval after which code that catches the interruption is interrupted again."""


class CallTimedOut(BaseException):
    """Raised inside a call by the signal; derived from BaseException, so that a user's `except Exception` does not
    catch it."""


def interrupted(call: Callable[[], Any], limit_s: float) -> Any:
    """Make a call and return its value; after `limit_s`, CallTimedOut is raised repeatedly in it."""
    is_armed = True

    def ring(*_: object) -> None:
        if is_armed:
            raise CallTimedOut

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
        returned = call()
        is_armed = False
        return returned
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
