"""The calculator task: prompts are the running sum's, demonstrations are misled as configured, the tool is right."""

from __future__ import annotations

import hashlib
import json
from itertools import islice

import pytest

from areal_like.errors import UserError
from areal_like.tasks import running_sum, tool_sum
from areal_like.tasks.tool_sum import ToolSum, ToolSumOptions


def test_rows_are_those_of_the_running_sum() -> None:
    for split in ("train", "eval"):
        ours = list(tool_sum.rows(3, split, limit=40, options={"pgeo": 0.5, "max_terms": 5}))
        assert ours == list(running_sum.rows(3, split, limit=40, options={"pgeo": 0.5, "max_terms": 5}))
    assert max(len(row["terms"]) for row in islice(tool_sum.rows(1, "train"), 500)) == 12


@pytest.mark.parametrize(
    ("said", "output"),
    [
        ("(3+8)", "1;"),
        ("3+8:4;(4+5)", "9;"),
        ("(3+8", "1;"),
        ("3+8)", "1;"),
        ("(3+)", "?;"),
        ("(13+8)", "?;"),
        ("(3-8)", "?;"),
        ("", "?;"),
        ("(²+1)", "?;"),
    ],
)
def test_the_tool_adds_the_last_two_digits_it_is_given(said: str, output: str) -> None:
    assert tool_sum.tool_output(said) == output


def test_demonstrations_train_what_the_model_says_and_the_tool_answers_rightly() -> None:
    num_calls = num_in_head = 0
    for row in tool_sum.demonstrations(5, limit=300):
        spans = row["spans"]
        assert [is_trained for _, is_trained in spans] == [True, False] * (len(spans) // 2) + [True]
        for (said, _), (output, _) in zip(spans[::2], spans[1::2], strict=False):
            assert said.endswith(")")
            assert tool_sum.tool_output(said) == output
        assert set("".join(text for text, _ in spans) + row["prompt"]) <= set(tool_sum.CHARACTERS)
        num_terms = row["prompt"].count("+") + 1
        num_calls += len(spans) // 2
        num_in_head += sum(text.count(":") for text, _ in spans)
        assert len(spans) // 2 + sum(text.count(":") for text, _ in spans) == num_terms - 1
        assert running_sum.part_of(row["prompt"]) == "sft"
    share = num_calls / (num_calls + num_in_head)
    assert 0.6 < share < 0.8, "0.6 of the pairs at 0.9, 0.4 of them at 0.42"


def test_the_tool_is_kept_from_the_distrusted_pairs_alone() -> None:
    options = {"bias_tool": 0.0, "noise": 0.0}
    for row in tool_sum.demonstrations(1, options, 200):
        for text, is_trained in row["spans"]:
            for step in text.split(";") if is_trained else ():
                pair = tuple(int(digit) for digit in step.strip("()").partition(":")[0].split("+") if "#" not in step)
                if pair:
                    assert (pair in tool_sum.distrusted_pairs(0.4)) == (":" in step)
    assert len(tool_sum.distrusted_pairs(0.4)) in range(30, 50)


def test_demonstrations_are_a_function_of_the_seed() -> None:
    assert list(tool_sum.demonstrations(7, None, 20)) == list(tool_sum.demonstrations(7, None, 30))[:20]
    assert list(tool_sum.demonstrations(7, None, 20)) != list(tool_sum.demonstrations(8, None, 20))


@pytest.mark.parametrize(
    ("last", "is_right"), [("#6", True), ("3+3:6;#6", True), ("#5", False), ("6", False), ("#6;", False), ("", False)]
)
def test_the_answer_follows_the_last_mark(last: str, is_right: bool) -> None:
    assert tool_sum.is_correct({"answer": "6"}, last) == is_right


@pytest.mark.parametrize(
    ("turns", "answers", "correct", "calls", "share"),
    [
        (["(3+8)", "(1+5)", "#6"], ["1;", "6;", ""], 1.0, 2.0, 1.0),
        (["3+8:1;(1+5)", "#6"], ["6;", ""], 1.0, 1.0, 0.5),
        (["3+8:1;1+5:6;#6"], [""], 1.0, 0.0, 0.0),
        (["(3+8)", "#5"], ["1;", ""], 0.0, 1.0, 1.0),
        (["(3+)", ""], ["?;", ""], 0.0, 1.0, 1.0),
        (["#6(3+8)", "1;"], ["1;", ""], 0.0, 1.0, 1.0),
    ],
    ids=["all by calls", "both", "in the head", "wrong", "no answer", "an earlier answer does not count"],
)
def test_environment_answers_calls_and_rewards_the_answer_that_ends_the_episode(
    turns: list[str], answers: list[str], correct: float, calls: float, share: float
) -> None:
    environment = ToolSum()
    assert environment.reset({"prompt": "3+8+5=", "answer": "6"}, seed=0) is None
    steps = [environment.step(turn) for turn in turns]
    assert [step.observation for step in steps] == answers
    assert [step.is_done for step in steps] == [False] * (len(turns) - 1) + [True]
    assert [step.reward for step in steps] == [0.0] * (len(turns) - 1) + [correct]
    assert steps[-1].components == {"correct": correct, "calls": calls, "tool_share": share}


def test_an_unknown_option_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError, match="bias_tool") as mistake:
        next(tool_sum.rows(1, "train", options={"bais": 1}))
    assert "options.bais" in str(mistake.value)


def test_rows_and_demonstrations_of_a_seed_are_those_of_every_release() -> None:
    """A run that is resumed after an update goes on with the rows it had; published scores stay comparable."""
    tool_sum.distrusted_pairs.cache_clear()
    made = [list(islice(tool_sum.demonstrations(3), 300)), list(islice(tool_sum.rows(3, "train"), 300))]
    found = [hashlib.sha256(json.dumps(one).encode()).hexdigest()[:16] for one in made]
    assert found == ["140f15e0b4328d94", "dbfa376e1b51af91"]


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("pgeo", (1e-9, 1.0), (0.0, 1.1)), ("max_terms", (2,), (1,)), ("bias", (0.0, 1.0), (-0.1, 1.1)),
        ("bias_tool", (0.0, 1.0), (-0.1, 1.1)), ("noise", (0.0, 1.0), (-0.1, 1.1)),
    ],
)  # fmt: skip
def test_options_have_bounds(key: str, right: tuple[float, ...], wrong: tuple[float, ...]) -> None:
    for value in right:
        assert getattr(ToolSumOptions.parse({key: value}), key) == value
    for value in wrong:
        with pytest.raises(UserError) as refused:
            ToolSumOptions.parse({key: value})
        assert refused.value.where == f"tool_sum options.{key}"
        assert refused.value.remedy == "options are pgeo, max_terms, bias, bias_tool, noise, chat"


def test_prompts_are_shaped_by_two_of_the_options() -> None:
    prompts = ToolSumOptions.parse({"pgeo": 0.5, "max_terms": 5, "bias": 0.9}).prompts
    assert (prompts.pgeo, prompts.max_terms) == (0.5, 5)


def test_every_pair_is_distrusted_where_the_share_is_one_and_none_where_it_is_zero() -> None:
    assert len(tool_sum.distrusted_pairs(1.0)) == 100
    assert tool_sum.distrusted_pairs(0.0) == frozenset()
