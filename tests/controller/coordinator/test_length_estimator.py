"""Claims about expected lengths: they follow what ended lately, and a long answer has more to go than a fresh one."""

from __future__ import annotations

import numpy as np
import pytest

from controller.coordinator.length_estimator import MIN_KNOWN, WINDOW, LengthStatistics


def test_half_of_what_is_allowed_is_assumed_before_anything_is_known() -> None:
    lengths = LengthStatistics(100)
    assert lengths.expected_left(0) == 50
    assert lengths.expected_left(80) == 10
    for _ in range(MIN_KNOWN - 1):
        lengths.add(4)
    assert lengths.expected_left(0) == 50


def test_expectation_meets_a_plain_mean_over_longer_answers() -> None:
    rng = np.random.default_rng(0)
    drawn = [int(value) for value in rng.lognormal(4.0, 1.0, WINDOW)]
    lengths = LengthStatistics(10_000)
    for value in drawn:
        lengths.add(value)
    for so_far in (0, 10, 55, 200):
        longer = [value - so_far for value in drawn if value > so_far]
        assert lengths.expected_left(so_far) == pytest.approx(sum(longer) / len(longer))
    assert lengths.expected_left(400) > lengths.expected_left(0), "a long tail"


def test_old_lengths_are_forgotten() -> None:
    lengths = LengthStatistics(10_000)
    for _ in range(WINDOW):
        lengths.add(10)
    for _ in range(WINDOW):
        lengths.add(100)
    assert lengths.mean == 100


def test_expectation_is_positive_and_within_what_is_allowed() -> None:
    lengths = LengthStatistics(64)
    for value in range(1, 65):
        lengths.add(value)
    for so_far in range(200):
        assert 1 <= lengths.expected_left(so_far) <= max(1, 64 - so_far)
