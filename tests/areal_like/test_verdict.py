"""A verdict carries a finite reward if and only if the answer was scored."""

from __future__ import annotations

import pytest

from areal_like.verdict import Verdict


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_a_score_is_a_finite_number(value: float | None) -> None:
    with pytest.raises(ValueError, match="a verdict of kind `scored` must have a finite value"):
        Verdict(kind="scored", value=value)
    assert Verdict(kind="scored", value=0.0).is_scored is True


@pytest.mark.parametrize("kind", ["timed_out", "crashed", "invalid"])
def test_an_answer_without_a_score_has_no_number_not_even_zero(kind: str) -> None:
    with pytest.raises(ValueError, match=f"a verdict of kind {kind} must not have a value"):
        Verdict(kind=kind, value=0.0)  # type: ignore[arg-type]
    assert Verdict(kind=kind).is_scored is False  # type: ignore[arg-type]


def test_an_answer_was_scored_once_and_at_no_cost_where_nothing_else_is_said() -> None:
    assert (Verdict(kind="scored", value=1.0).attempts, Verdict(kind="scored", value=1.0).wall_s) == (1, 0.0)
