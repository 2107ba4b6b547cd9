"""The weighted sum, the format scorer, and user functions that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.errors import UserError
from services.config import ScorerSettings
from services.reward.composition import WeightedSum
from services.reward.job import Job, Outcome


def sum_of(*scorers: dict[str, Any]) -> WeightedSum:
    return WeightedSum.from_settings(tuple(ScorerSettings(**scorer) for scorer in scorers))


def score(weighted_sum: WeightedSum, response: str, finish_reason: str = "stop", **row: Any) -> Outcome:
    job = Job(job_id=1, scorer="", row=row, response=response, finish_reason=finish_reason, num_tokens=1)
    return weighted_sum.score(job, lambda name: None)


CONTAINS = {"kind": "format", "options": {"must_contain": ["<think>"]}}


def test_value_is_the_weighted_sum_and_components_are_unweighted() -> None:
    weighted_sum = sum_of({"kind": "math", "weight": 2.0}, {**CONTAINS, "weight": 0.5})
    outcome = score(weighted_sum, r"<think> \boxed{7}", answer="7")
    assert outcome.value == 2.5
    assert outcome.components == {"math": 1.0, "correct": 1.0, "format": 1.0}
    outcome = score(weighted_sum, r"\boxed{8}", answer="7")
    assert outcome.value == 0.0
    assert outcome.components["correct"] == 0.0
    assert set(outcome.scorer_s) == {"math", "format"}


def test_a_part_that_does_not_score_is_no_zero_but_fails_the_sum() -> None:
    outcome = score(sum_of(CONTAINS, {"kind": "math"}), "<think> 7", question="no gold here")
    assert (outcome.kind, outcome.value, outcome.scorer) == ("invalid", None, "math")
    assert outcome.reason.startswith("math: the row has no gold answer")


def test_two_scorers_of_one_kind_have_names_of_their_own() -> None:
    weighted_sum = sum_of(CONTAINS, {"kind": "format", "options": {"must_stop": True}})
    assert weighted_sum.names == ["format", "format#2"]
    assert score(weighted_sum, "<think>", "length").components == {"format": 1.0, "format#2": 0.0}


def test_each_scorer_is_announced_before_it_runs() -> None:
    announced: list[str] = []
    job = Job(job_id=1, scorer="", row={"answer": "1"}, response="1", finish_reason="stop", num_tokens=1)
    sum_of({"kind": "math"}, CONTAINS).score(job, announced.append)
    assert announced == ["math", "format"]


def test_the_running_sum_needs_the_end_of_the_answer() -> None:
    weighted_sum = sum_of({"kind": "running_sum"})
    assert score(weighted_sum, "3+8=1;#1", answer="1").components == {"running_sum": 1.0, "correct": 1.0}
    assert score(weighted_sum, "3+8=1;#1", "length", answer="1").value == 0.0
    assert score(weighted_sum, "3+8=1;#1").kind == "invalid"


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"regex": "^<think>.*</think>"}, "<think>\na\n</think>b", "a<think></think>"),
        ({"must_contain": ["a", "b"]}, "ba", "b"),
    ],
)
def test_format_asks_for_all_of_its_checks(options: dict[str, Any], good: str, bad: str) -> None:
    weighted_sum = sum_of({"kind": "format", "options": {**options, "must_stop": True}})
    assert score(weighted_sum, good).value == 1.0
    assert score(weighted_sum, bad).value == 0.0
    assert score(weighted_sum, good, "length").value == 0.0
    assert "correct" not in score(weighted_sum, good).components


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        ({"kind": "maths"}, ["maths", "did you mean math"]),
        ({"kind": "judge"}, ["judge", "module:function"]),
        ({"kind": "math", "options": {"rulez": 1}}, ["rulez", "options are", "rules"]),
        ({"kind": "format"}, ["asks for nothing"]),
        ({"kind": "format", "options": {"regex": "("}}, ["regular expression"]),
        ({"kind": "running_sum", "options": {"x": 1}}, ["takes no options"]),
        ({"kind": "math", "weight": float("nan")}, ["weight"]),
        ({"kind": "no_such_module:score"}, ["no_such_module", "cannot be imported", "No module named"]),
        ({"kind": "scorer_zoo:no_such_function"}, ["scorer_zoo", "no_such_function"]),
        ({"kind": "scorer_zoo:not_callable"}, ["scorer_zoo", "not_callable", "cannot be called"]),
        ({"kind": "scorer_zoo:wrong_signature"}, ["wrong_signature", "def score(row, response, **info)"]),
        ({"kind": "scorer_zoo:with_options"}, ["with_options", "scale"]),
        ({"kind": "scorer_zoo:score", "options": {"response": 1}}, ["option response is taken"]),
        ({"kind": ":score"}, ["module:function"]),
    ],
)
def test_what_cannot_be_used_is_the_users_mistake_and_says_why(scorer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        sum_of(scorer)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_options_reach_a_user_function() -> None:
    weighted_sum = sum_of({"kind": "scorer_zoo:with_options", "options": {"scale": 3.5}})
    assert score(weighted_sum, "").value == 3.5
