"""Scorer `math`: what counts as the final answer, what counts as equal, and real gold answers against themselves."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import num_examples

from services.reward.scorers import final_answer, maths
from services.reward.scorers.maths import MathOptions, MathScorer, are_equivalent, is_explosive
from services.reward.scorers.port import CannotJudge, ScorerInput
from services.reward.scorers.quantities import number_of

Published = Callable[[str], Path]


def value(gold: str, response: str, finish_reason: str = "stop", **options: Any) -> float:
    scorer = MathScorer(MathOptions(**options))
    sample = ScorerInput(row={"answer": gold}, response=response, finish_reason=finish_reason, num_tokens=1)
    parts = scorer.score(sample)
    assert parts["value"] == parts["correct"]
    return float(parts["value"])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{3} and then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3}, no, \boxed{4", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 7", "7"),
        ("3 apples\n#### 42", "42"),
        ("#### 1 and later #### 1,234", "1,234"),
        ("The answer is 72.", "72"),
        ("The final answer is **$\\sqrt{2}$**. Done", r"\sqrt{2}"),
        ("Answer: 18 dollars for the whole week of work", "18"),
        ("first 3, then 1,500.25 and that is all", "1,500.25"),
        ("it is 3/4 of it", "3/4"),
        ("nothing here", None),
        ("", None),
        (r"\boxed{", None),
    ],
)
def test_final_answer_is_the_last_box_else_the_marker_else_the_last_number(response: str, answer: str | None) -> None:
    assert final_answer.of_response(response) == answer


def test_only_the_rules_of_the_options_count() -> None:
    assert value("7", "it is 7") == 1.0
    assert value("7", "it is 7", rules=("boxed",)) == 0.0
    assert value("7", r"\boxed{7}", rules=("boxed",)) == 1.0


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"answer": "3 + 4 <<3+4=7>>\n#### 7"}, "7"),
        ({"answer": "1\n#### 1,250"}, "1,250"),
        ({"answer": r"\frac{1}{2}"}, r"\frac{1}{2}"),
        ({"answer": 7}, "7"),
        ({"final_answer": "9"}, "9"),
        ({"solution": r"thus \boxed{x^2}."}, "x^2"),
        ({"answer": "", "solution": r"thus \boxed{x^2}."}, "x^2"),
        ({"solution": r"they are $\boxed{1}$ and $\boxed{-3}$."}, "1, -3"),
        ({"solution": "no box"}, None),
        ({"question": "2+2?"}, None),
    ],
)
def test_gold_answer_is_found_in_the_usual_columns(row: dict[str, Any], gold: str | None) -> None:
    assert final_answer.of_row(row) == gold


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("1000", r"\boxed{1,000}"),
        ("72", "The answer is $72."),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        ("1/2", "answer: 0.5"),
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}"),
        ("x^2y^2", r"\boxed{y^2 x^2}"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}"),
        ("16", r"\boxed{2^{2^2}}"),
        ("50", r"\boxed{50\%}"),
        ("21", r"\boxed{21 \text{ dogs}}"),
        (r"2^{4950}", r"\boxed{2^{4950}}"),
        (r"\text{Evelyn}", r"\boxed{Evelyn}"),
        ("7", "x" * 300_000 + r"\boxed{7}"),
    ],
)
def test_equivalent_answers_are_right(gold: str, response: str) -> None:
    assert value(gold, response) == 1.0


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("72", r"\boxed{72} or \boxed{73}"),
        ("3", r"\boxed{3x}"),
        ("5", r"\boxed{5 million}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("3.14", "the answer is 3.15"),
        ("7", ""),
        ("7", r"\boxed{__import__('os').abort()}"),
        ("7", "٧"),
        ("7", r"\boxed{" + "(" * 300 + "7" + ")" * 300 + "}"),
        ("7", r"\boxed{" * 20_000),
        ("7", r"\boxed{7}" + "9" * 60_000),
    ],
)
def test_other_answers_are_wrong(gold: str, response: str) -> None:
    assert value(gold, response) == 0.0


@pytest.mark.parametrize(
    "answer", ["9**9**9", "9^9^9", "9^{9^{9}}", "9^(9^9)", "2^{100000}", "99999!", "5!!", "9^9^9^9", "1" * 400]
)
def test_explosive_expressions_end_as_wrong_without_being_evaluated(answer: str) -> None:
    assert is_explosive(answer)
    assert value("7", rf"\boxed{{{answer}}}") == 0.0


@pytest.mark.parametrize(
    "answer", ["2^{2^2}", "x^2y^2", "-29x^5(7x^6-2)", r"\cos(6^\circ)\sin(12^\circ)", "100!", "2^{10}"]
)
def test_ordinary_expressions_are_not_explosive(answer: str) -> None:
    assert not is_explosive(answer)


def test_a_cut_response_is_wrong_where_it_must_stop() -> None:
    assert value("7", r"\boxed{7}", "length") == 1.0
    assert value("7", r"\boxed{7}", "length", must_stop=True) == 0.0


def test_a_row_without_gold_cannot_be_judged() -> None:
    sample = ScorerInput(row={"question": "?"}, response="7", finish_reason="stop", num_tokens=1)
    with pytest.raises(CannotJudge, match="no gold answer"):
        MathScorer(MathOptions()).score(sample)


def test_every_gsm8k_answer_verifies_against_itself_and_not_against_the_next(published: Published) -> None:
    scorer = MathScorer(MathOptions())
    rows = [json.loads(line) for line in published("gsm8k/train.jsonl").open()]
    share = len(rows) // num_examples(len(rows))
    for row, following in list(zip(rows, rows[1:] + rows[:1], strict=True))[::share]:
        own = ScorerInput(row=row, response=row["answer"], finish_reason="stop", num_tokens=1)
        other = ScorerInput(row=row, response=following["answer"], finish_reason="stop", num_tokens=1)
        assert scorer.score(own)["value"] == 1.0
        assert scorer.score(other)["value"] == float(row["final_answer"] == following["final_answer"])


def test_math_gold_answers_are_equivalent_to_themselves_without_the_literal_short_cut(published: Published) -> None:
    with gzip.open(published("math/math_test.jsonl.gz"), "rt") as file:
        answers = [json.loads(line)["answer"] for line in file][::17]
    wrong = [answer for answer in answers if number_of(answer) is None and not are_equivalent(answer, answer, 6)]
    assert wrong == []


def test_warm_up_parses_once_and_silences_the_warning_that_time_outs_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []
    monkeypatch.setattr(maths, "are_equivalent", lambda *facts: asked.append(facts))
    log = logging.getLogger("math_verify")
    log.setLevel(logging.NOTSET)
    MathScorer(MathOptions(float_digits=4)).warm_up()
    assert log.level == logging.ERROR
    ((gold, answer, digits),) = asked
    assert digits == 4
    assert gold != answer, "equal texts would not be parsed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(" * 8 + "1" + ")" * 8, False),
        ("(" * 9 + "1" + ")" * 9, True),
        ("([" * 4 + "1" + "])" * 4, False),
        ("([" * 5 + "1" + "])" * 5, True),
        ("(1)+[2]" * 12, False),  # one after the other
        ("x + 1 - 2 + 3 - 4 + 5 - 6", False),
    ],
)
def test_an_expression_nested_too_deeply_is_not_evaluated(text: str, expected: bool) -> None:
    assert is_explosive(text) == expected
