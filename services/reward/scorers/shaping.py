"""Reward components that vary among answers if correct ones are too rare; they do not measure correctness.

They are small pure functions, named as `services.reward.scorers.shaping:<function>`. None returns `correct`, so
evaluation never counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGITS = frozenset("0123456789")


def digit_share(row: Mapping[str, Any], response: str, **info: Any) -> float:
    """Share of the response's characters that are the digits 0 to 9, in [0, 1]; 0 for an empty response.

    A randomly initialised model never solves a word problem, but some of its answers have more digits than others.
    """
    return sum(character in DIGITS for character in response) / len(response) if response else 0.0


def printable_share(row: Mapping[str, Any], response: str, **info: Any) -> float:
    """Share of the response's characters that can occur in a program (printable ASCII, tab, newline), in [0, 1].

    For randomly initialised models over bytes: none of their programs passes a test, but some look more like text.
    """
    if not response:
        return 0.0
    return sum(" " <= character <= "~" or character in "\t\n" for character in response) / len(response)
