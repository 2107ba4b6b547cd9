"""The weighted sum, the format scorer, and user functions that cannot be used."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from areal_like.errors import UserError
from areal_like.verdict import MAX_REASON_CHARS
from services.reward.composition import MAX_COMPONENTS, Part, WeightedSum
from services.reward.config import ClipSettings, ScorerSettings
from services.reward.job import Job, Outcome
from services.reward.scorers.port import CannotJudge, ScorerInput, TookTooLong


def sum_of(*scorers: dict[str, Any]) -> WeightedSum:
    return WeightedSum.from_settings(tuple(ScorerSettings(**scorer) for scorer in scorers))


def score(weighted_sum: WeightedSum, response: str, finish_reason: str = "stop", **row: Any) -> Outcome:
    job = Job(job_id=1, scorer="", row=row, response=response, finish_reason=finish_reason, num_tokens=1)
    return weighted_sum.score(job, lambda name: None)


CONTAINS = {"kind": "format", "options": {"must_contain": ["<think>"]}}


def test_value_is_the_weighted_sum_and_components_are_unweighted() -> None:
    weighted_sum = sum_of({"kind": "math", "weight": 2.0}, {**CONTAINS, "weight": 0.5})
    started_s = time.perf_counter()
    outcome = score(weighted_sum, r"<think> \boxed{7}", answer="7")
    elapsed_s = time.perf_counter() - started_s
    assert 0 < sum(outcome.scorer_s.values()) <= elapsed_s
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
        ({"kind": "nurse"}, ["nurse", "module:function"]),
        ({"kind": "math", "options": {"rulez": 1}}, ["rulez", "options are", "rules"]),
        ({"kind": "format"}, ["checks nothing"]),
        ({"kind": "format", "options": {"regex": "("}}, ["regular expression"]),
        ({"kind": "running_sum", "options": {"x": 1}}, ["option x", "the scorer has none"]),
        ({"kind": "no_such_module:score"}, ["no_such_module", "cannot be imported", "No module named"]),
        ({"kind": "scorer_zoo:no_such_function"}, ["scorer_zoo", "no_such_function"]),
        ({"kind": "scorer_zoo:not_callable"}, ["scorer_zoo", "not_callable", "is not callable"]),
        ({"kind": "scorer_zoo:wrong_signature"}, ["wrong_signature", "def score(row, response, **info)"]),
        (
            {"kind": "scorer_zoo:as_trl_has_them"},
            ["as_trl", "def score(row, response, **info)", "completions=[response]"],
        ),
        ({"kind": "scorer_zoo:as_verl_has_them"}, ["as_verl", "solution_str=response"]),
        ({"kind": "scorer_zoo:as_openrlhf_has_them"}, ["as_openrlhf", "def score(row, response, **info)", "OpenRLHF"]),
        ({"kind": "scorer_zoo:with_options"}, ["with_options", "scale"]),
        (
            {"kind": "scorer_zoo:score", "options": {"response": 1}},
            ["the option name response is reserved"],
        ),
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


GATE = {**CONTAINS, "weight": 0.0, "gate": {"at_least": 1, "otherwise": -0.5}}


def test_an_answer_that_fails_a_gate_gets_the_stated_value_and_nothing_else_is_run() -> None:
    announced: list[str] = []
    job = Job(job_id=1, scorer="", row={"answer": "7"}, response="7", finish_reason="stop", num_tokens=1)
    outcome = sum_of({"kind": "math"}, GATE).score(job, announced.append)  # the gate comes first, wherever it stands
    assert announced == ["format"]
    assert outcome.value == -0.5
    assert outcome.components == {"format": 0.0, "correct": 0.0}
    assert outcome.reason == "format: the gate was not passed"


def test_an_answer_that_passes_all_gates_gets_the_sum() -> None:
    second = {"kind": "format", "weight": 0.25, "gate": {}, "options": {"must_stop": True}}
    weighted_sum = sum_of({"kind": "math"}, GATE, second)
    assert score(weighted_sum, "<think> 7", answer="7").value == 1.25
    outcome = score(weighted_sum, "<think> 7", "length", answer="7")
    assert (outcome.value, outcome.components) == (0.0, {"format": 1.0, "format#2": 0.0, "correct": 0.0})


def test_a_held_out_scorer_is_run_for_an_answer_that_fails_a_gate() -> None:
    judge = {"kind": "format", "weight": 0.0, "held_out": True, "options": {"must_stop": True}}
    outcome = score(sum_of({"kind": "math"}, judge, GATE), r"\boxed{7}", answer="7")
    assert outcome.value == -0.5
    assert outcome.components == {"format": 1.0, "format#2": 0.0, "correct": 0.0}


def test_a_gate_that_does_not_score_is_no_gate_that_failed() -> None:
    broken = {"kind": "math", "gate": {"at_least": 1, "otherwise": 0}}
    assert score(sum_of(CONTAINS, broken), "7", question="no gold here").kind == "invalid"


def test_components_stand_in_the_configurations_order_whatever_ran_first() -> None:
    gate = {"kind": "scorer_zoo:graded", "gate": {"at_least": 0.1}}
    outcome = score(sum_of({"kind": "math"}, gate), "8", answer="7")
    assert outcome.components == {"math": 0.0, "correct": 0.0, "scorer_zoo:graded": 0.5}  # math's `correct`, not zoo's


def test_parts_are_clipped_before_the_weight_and_the_sum_after_it() -> None:
    fixed = {"kind": "scorer_zoo:with_options", "options": {"scale": 8.0}}
    weighted_sum = sum_of({**fixed, "weight": -2.0, "clip": {"max": 3.0}})
    outcome = score(weighted_sum, "")
    assert (outcome.value, outcome.components) == (-6.0, {"scorer_zoo:with_options": 8.0})
    clipped = WeightedSum.from_settings((ScorerSettings(**fixed),), ClipSettings(min=-1.0, max=1.0))
    assert score(clipped, "").value == 1.0


def test_a_part_asked_for_alone_is_neither_gated_nor_clipped_nor_weighted() -> None:
    weighted_sum = sum_of({"kind": "scorer_zoo:with_options", "options": {"scale": 8.0}, "weight": 3.0,
                           "clip": {"max": 1.0}, "gate": {"at_least": 9.0}})  # fmt: skip
    job = Job(job_id=1, scorer="scorer_zoo:with_options", row={}, response="", finish_reason="stop", num_tokens=1)
    assert weighted_sum.score(job, lambda name: None).value == 8.0


def test_no_number_is_not_clipped_into_one() -> None:
    weighted_sum = sum_of({"kind": "scorer_zoo:with_options", "options": {"scale": float("inf")}, "clip": {"max": 1.0}})
    assert score(weighted_sum, "").kind == "invalid"


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(weight: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        ScorerSettings(kind="math", weight=weight)


@pytest.mark.parametrize("clip", [{}, {"min": 1.0, "max": 1.0}, {"low": 0.0}])
def test_bounds_that_bound_nothing_are_refused(clip: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScorerSettings(kind="math", clip=clip)  # type: ignore[arg-type]


class Fixed:
    """A scorer that gives these values."""

    version = "1"

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def warm_up(self) -> None: ...

    def score(self, sample: ScorerInput) -> dict[str, Any]:
        return self.values


def fixed(values: dict[str, Any]) -> Outcome:
    return score(WeightedSum((Part("a", 1.0, Fixed(values)),)), "x")


def test_so_many_components_are_kept_and_no_more() -> None:
    parts = {f"p{number}": 1.0 for number in range(MAX_COMPONENTS - 1)}
    outcome = fixed({"value": 2.0, **parts})
    assert (outcome.kind, len(outcome.components)) == ("scored", MAX_COMPONENTS)
    outcome = fixed({"value": 2.0, **parts, "one": 1.0})
    assert (outcome.kind, outcome.reason) == ("invalid", "a: returned 65 components, but at most 64 are allowed")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "a: returned no value"), ({"value": "1"}, "a: value must be a number, not str"),
        ({"value": b"1"}, "a: value must be a number, not bytes"),
        ({"value": [1]}, "a: value must be a number, not list"),
        ({"value": 10**400}, "a: value must be a number, not int"), ({"value": float("nan")}, "a: value is nan"),
        ({"value": 1, "p" * 99: None}, f"a: component '{'p' * 40}' must be a number, not NoneType"),
        ({"value": 1, "style": float("-inf")}, "a: component 'style' is -inf"),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_says_which_and_what_it_is(values: dict[str, Any], words: str) -> None:
    outcome = fixed(values)
    assert (outcome.kind, outcome.reason, outcome.value, outcome.scorer) == ("invalid", words, None, "a")


def test_remark_is_the_reason_of_a_score_and_no_component() -> None:
    outcome = fixed({"value": 1, "remark": "well said"})
    assert (outcome.reason, outcome.components) == ("a: well said", {"a": 1.0})
    assert fixed({"value": 1, "remark": ""}).reason == ""
    assert fixed({"value": 1, "remark": 3}).components == {"a": 1.0, "a.remark": 3.0}
    assert len(fixed({"value": 1, "remark": "x" * 999}).reason) == MAX_REASON_CHARS


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (CannotJudge("no gold"), "invalid", "a: no gold"), (TookTooLong("slow"), "timed_out", "a: slow"),
        (ValueError("first\nlast\n"), "crashed", "a: ValueError: last"), (SystemExit(3), "crashed", "a: SystemExit: 3"),
        (ValueError(), "crashed", "a: ValueError: "), (Odd(), "crashed", "a: Odd: (the message cannot be shown)"),
        (ValueError("x" * 999), "crashed", ("a: ValueError: " + "x" * 999)[:MAX_REASON_CHARS]),
    ],
)  # fmt: skip
def test_whatever_a_scorer_raises_is_the_verdict_on_its_own_sample(error: Any, kind: str, words: str) -> None:
    class Raising(Fixed):
        def score(self, sample: ScorerInput) -> dict[str, Any]:
            raise error

    outcome = score(WeightedSum((Part("a", 1.0, Raising({})),)), "x")
    assert (outcome.kind, outcome.reason, outcome.value) == (kind, words, None)
    assert outcome.scorer_s.keys() == {"a"}


def test_unknown_scorer_names_those_there_are() -> None:
    job = Job(job_id=4, scorer="no", row={}, response="x", finish_reason="stop", num_tokens=1)
    outcome = sum_of({"kind": "math"}, CONTAINS).score(job, lambda name: pytest.fail("run"))
    assert (outcome.job_id, outcome.kind) == (4, "invalid")
    assert outcome.reason == "unknown scorer 'no'; this service has math, format"


def test_sum_that_overflows_is_no_score() -> None:
    parts = (Part("a", 1e308, Fixed({"value": 1.0})), Part("b", 1e308, Fixed({"value": 1.0})))
    outcome = score(WeightedSum(parts), "x")
    assert (outcome.kind, outcome.reason, set(outcome.scorer_s)) == (
        "invalid", "the weighted sum is not finite", {"a", "b"}
    )  # fmt: skip


def test_scorers_are_warmed_up_labelled_and_asked_whether_they_are_deterministic() -> None:
    class Warm(Fixed):
        is_deterministic = False
        num_warm = 0

        def warm_up(self) -> None:
            self.num_warm += 1

    warm, plain = Warm({"value": 1}), Fixed({"value": 1})
    both = WeightedSum((Part("w", 1.0, warm), Part("p", 1.0, plain)))
    both.warm_up()
    assert warm.num_warm == 1
    assert (both.label, both.names, both.volatile) == ("w@1+p@1", ["w", "p"], ["w"])
