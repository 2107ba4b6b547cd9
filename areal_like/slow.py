"""Prints what a command waits for when importing a user's code takes long. Deadlines are enforced by the caller."""

from __future__ import annotations

import sys


def print_slow(what: str, waited_s: float, limit_s: float) -> None:
    """Print that `what` ("importing mine:score") has taken `waited_s` and is abandoned after `limit_s`."""
    text = f"{what} has taken {waited_s:g} s so far; it is abandoned after {limit_s:g} s"
    print(text, file=sys.stderr, flush=True)
