"""The line that says what a command waits for, when a user's own code takes long to be imported.

Owns: its words. Refuses: deadlines (the caller's).
"""

from __future__ import annotations

import sys


def print_slow(what: str, waited_s: float, limit_s: float) -> None:
    """`what` ("importing mine:score") has taken `waited_s` and will be given up after `limit_s`."""
    text = f"{what} has taken {waited_s:g} s so far; it is abandoned after {limit_s:g} s"
    print(text, file=sys.stderr, flush=True)
