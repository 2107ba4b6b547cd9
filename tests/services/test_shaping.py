"""Shaping components."""

from __future__ import annotations

import pytest

from services.reward.scorers.shaping import digit_share, printable_share
from services.reward.scorers.user_function import find_function


@pytest.mark.parametrize(
    ("response", "share"), [("", 0.0), ("abc", 0.0), ("12", 1.0), ("a1b2", 0.5), ("\N{SUPERSCRIPT TWO}", 0.0)]
)
def test_digit_share_counts_plain_digits(response: str, share: float) -> None:
    assert digit_share({}, response, finish_reason="stop", num_tokens=3) == share


def test_digit_share_can_be_named_in_a_config() -> None:
    assert find_function("services.reward.scorers.shaping:digit_share", {}) is digit_share


@pytest.mark.parametrize(
    ("response", "share"), [("", 0.0), ("def f():\n\tpass", 1.0), ("a\x00\ufffdb", 0.5), (" ~\x1f\x7f", 0.5)]
)
def test_printable_share_counts_what_programs_are_written_in(response: str, share: float) -> None:
    assert printable_share({}, response, finish_reason="stop", num_tokens=3) == share
