"""Scorers `overlong` and `length`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from areal_like.errors import UserError
from services.reward.config import ScorerSettings
from services.reward.make_scorer import make_scorer
from services.reward.scorers.port import ScorerInput


def value(kind: str, options: dict[str, Any], num_tokens: int, finish_reason: str = "stop") -> float:
    sample = ScorerInput(row={}, response="", finish_reason=finish_reason, num_tokens=num_tokens)
    return make_scorer(ScorerSettings(kind=kind, options=options)).score(sample)["value"]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (16384, 0.0), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (99999, -1.0)],
)
def test_overlong_is_the_formula_of_dapo(num_tokens: int, penalty: float) -> None:
    # eq. 13 with the paper's numbers: L_max 20,480, L_cache 4,096
    assert value("overlong", {"max_tokens": 20480, "soft_tokens": 4096}, num_tokens) == pytest.approx(penalty)


def test_an_answer_that_is_not_overlong_has_no_negative_zero() -> None:
    found = value("overlong", {"max_tokens": 100, "soft_tokens": 50}, 10)
    assert (found, math.copysign(1.0, found)) == (0.0, 1.0)


def test_an_answer_cut_at_the_limit_is_overlong_only_on_demand() -> None:
    options = {"max_tokens": 100, "soft_tokens": 50, "penalty": 2.0}
    assert value("overlong", options, 10, "length") == 0.0
    assert value("overlong", options | {"cut_is_overlong": True}, 10, "length") == -2.0
    assert value("overlong", options | {"cut_is_overlong": True}, 75, "stop") == -1.0


@pytest.mark.parametrize(("num_tokens", "wanted"), [(4, 0.0), (5, 0.0), (7, 0.4), (10, 1.0), (20, 1.0), (23, 0.4)])
def test_length_falls_off_beyond_both_bounds(num_tokens: int, wanted: float) -> None:
    options = {"min_tokens": 10, "max_tokens": 20, "margin_tokens": 5}
    assert value("length", options, num_tokens) == pytest.approx(wanted)


def test_length_without_a_margin_is_all_or_nothing() -> None:
    assert [value("length", {"min_tokens": 3}, num_tokens) for num_tokens in (2, 3, 10**6)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("overlong", {}, "max_tokens"),
        ("overlong", {"max_tokens": 10, "soft_tokens": 11}, "must not be greater than max_tokens"),
        ("overlong", {"max_tokens": 10, "soft_tokens": 0}, "soft_tokens"),
        ("length", {}, "checks nothing"),
        ("length", {"min_tokens": 5, "max_tokens": 4}, "must not be greater than max_tokens"),
    ],
)
def test_lengths_that_ask_for_nothing_sensible_are_refused(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        value(kind, options, 1)
