"""Tasks of reasoning-gym: rows by seed, and answers judged by their own tasks."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.tasks import reasoning_gym
from areal_like.tasks.reasoning_gym import NO_ANSWER, part_of, rows
from services.reward.composition import WeightedSum
from services.reward.config import ScorerSettings
from services.reward.job import Job, Outcome
from services.reward.scorers.plain_answers import is_plain

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra `reasoning-gym` is not installed")

TWO = {"tasks": {"chain_sum": {"max_terms": 2}, "spell_backward": None}}


def made(seed: int = 1, split: Any = "train", limit: int = 12, options: dict[str, Any] = TWO) -> list[dict[str, Any]]:
    return list(rows(seed, split, limit=limit, options=options))


def score(row: dict[str, Any], response: str, finish_reason: str = "stop", **options: Any) -> Outcome:
    job = Job(job_id=1, scorer="", row=row, response=response, finish_reason=finish_reason, num_tokens=3)
    settings = ScorerSettings(kind="reasoning_gym", options=options)
    return WeightedSum.from_settings((settings,)).score(job, lambda name: None)


def test_rows_are_a_function_of_seed_and_split() -> None:
    assert made() == made()
    assert made() != made(seed=2)
    assert made(limit=5) == made()[:5]
    assert {row["task"] for row in made()} == {"chain_sum", "spell_backward"}


def test_no_question_is_in_both_parts_whatever_the_seed() -> None:
    options = {"tasks": {"chain_sum": {"max_terms": 2, "max_digits": 1}}}  # few different questions
    train = {row["prompt"] for seed in (1, 2) for row in made(seed, "train", 60, options)}
    held_out = {row["prompt"] for seed in (1, 3) for row in made(seed, "eval", 60, options)}
    assert train
    assert held_out
    assert not train & held_out
    assert all(part_of(question) == "eval" for question in held_out)


def test_weights_say_how_often_a_task_is_drawn() -> None:
    drawn = made(limit=200, options=TWO | {"weights": {"spell_backward": 9}})
    assert 150 < sum(row["task"] == "spell_backward" for row in drawn) < 200


def test_the_right_answer_is_right_and_another_is_not() -> None:
    for row in made():
        outcome = score(row, f"Let me see. <answer>{row['answer']}</answer>")
        assert (outcome.value, outcome.components["correct"]) == (1.0, 1.0)
        outcome = score(row, "<answer>surely not</answer>")
        assert outcome.kind == "scored"
        assert outcome.components["correct"] == 0.0
        assert outcome.value is not None
        assert outcome.value < 0.9  # partial credit is the task's own matter


def test_where_the_answer_stands_is_an_option() -> None:
    row = made()[0]
    answer = row["answer"]
    assert score(row, f"first\n{answer}", extract="last_line").value == 1.0
    assert score(row, f" {answer}\n", extract="whole").value == 1.0
    assert score(row, answer).value == 0.0
    assert score(row, f"<answer>1</answer> no, <answer>{answer}</answer>").value == 1.0
    assert score(row, f"<answer>{answer}</answer>", "length", must_stop=True).value == 0.0
    assert score(row, "<answer>" + "9" * 5000 + "</answer>").value == 0.0


def test_a_row_without_its_task_is_invalid() -> None:
    row = made()[0]
    place = row["reasoning_gym"]
    for broken in (
        {"prompt": "2+2", "answer": "4"},
        row | {"reasoning_gym": 3},
        row | {"reasoning_gym": place | {"index": place["index"] + 1}},
        row | {"reasoning_gym": place | {"task": "no_such_task"}},
        row | {"reasoning_gym": place | {"config": '{"max_terms": 3, "min_terms": 3}'}},
    ):
        assert score(broken, "<answer>4</answer>").kind == "invalid"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "tasks"),
        ({"tasks": {}}, "tasks"),
        ({"tasks": {"chain_summ": None}}, "did you mean chain_sum"),
        ({"tasks": {"chain_sum": {"max_turns": 3}}}, "use the options of the task: min_terms, max_terms"),
        ({"tasks": {"chain_sum": {"min_terms": 9, "max_terms": 3}}}, "rejects its configuration"),
        ({"tasks": {"chain_sum": {"seed": 3}}}, "cannot be set here; set data.seed"),
        ({"tasks": {"chain_sum": None}, "weights": {"other": 1}}, "`tasks` has no task of this name"),
        ({"tasks": {"chain_sum": None}, "weights": {"chain_sum": 0}}, "positive number"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        made(options=options)
    assert words in str(caught.value)


def test_a_task_with_too_few_questions_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "EVAL_SHARE", 0.0)
    with pytest.raises(UserError, match="too few different questions"):
        made(split="eval")


def test_a_task_without_a_single_answer_has_a_stand_in() -> None:
    row = next(islice(rows(1, "train", limit=1, options={"tasks": {"graph_color": None}}), 1))
    assert row["answer"] == NO_ANSWER


ATTACKS = [
    "__import__('os').system('touch {mark}')",
    "[open('{mark}', 'w')]",
    "open('{mark}','w')",
    "(lambda: open('{mark}', 'w'))()",
    'exec(\'open("{mark}", "w")\')',
    "[x for x in [open][0]('{mark}', 'w')]",
    "sin.__class__.__base__",
    "x.subs",
    "print(7)",
    "preview(x)",
    "9**9**9**9",
]


@pytest.mark.parametrize(
    "task", ["countdown", "polynomial_multiplication", "n_queens", "spiral_matrix", "string_insertion"]
)
def test_an_answer_is_never_run_as_a_program(task: str, tmp_path: Path) -> None:
    (row,) = made(limit=1, options={"tasks": {task: None}})
    assert score(row, f"<answer>{row['answer']}</answer>").value == 1.0
    mark = tmp_path / "mark"
    for attack in ATTACKS:
        outcome = score(row, f"<answer>{attack.format(mark=mark)}</answer>")
        assert outcome.kind == "scored", attack
        assert outcome.components["correct"] == 0.0, attack
        assert not mark.exists(), attack


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("(86 - 4) * 3 + 61/1", True), ("x**3/3 + sin(2*x) + C", True), ("-1.5*exp(x)", True), ("sqrt(2)*pi", True),
        ("x.subs(1)", False), ("(1).real", False), ("'a'", False), ("[1]", False), ("open(1)", False),
        ("f(x)", True), ("a__b", False), ("{1: 2}", False), ("lambda: 0", False), ("x;y", False), ("\uff45", False),
    ],
)  # fmt: skip
def test_what_counts_as_plain_arithmetic(answer: str, plain: bool) -> None:
    from reasoning_gym.games.countdown import CountdownDataset

    assert is_plain(answer, CountdownDataset) is plain


def test_a_task_that_evaluates_nothing_judges_any_answer() -> None:
    (row,) = made(limit=1, options={"tasks": {"spell_backward": None}})
    assert score(row, "<answer>" + "(" * 20 + "open()" + ")" * 20 + "</answer>").reason == ""
