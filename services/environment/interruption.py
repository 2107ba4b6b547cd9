"""A deadline for code that is not `async`: it is interrupted by a signal.

Owns: the signal and its timer. Refuses: code that hangs in a library of its own, which no signal stops: the service
ends its process (pool).

Signals reach the main thread alone, which is where an environment's methods run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

AGAIN_S = 0.1
"""Code that catches the interruption is interrupted again so often."""


class CallTimedOut(BaseException):
    """Raised inside a call by the signal; no `except Exception` of the user's may stop it."""


def interrupted(call: Callable[[], Any], limit_s: float) -> Any:
    """The value of a call; raises CallTimedOut in it, again and again, once `limit_s` is over."""
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
