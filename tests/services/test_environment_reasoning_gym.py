"""The environment `reasoning_gym`: attempts at tasks of the real package."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.tasks.reasoning_gym import rows
from services.environment.adapters import actions
from services.reward.scorers.port import CannotJudge
from services.reward.scorers.reasoning_gym_attempts import ReasoningGymEnvironment

needs_package = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="the extra `reasoning-gym` is not installed"
)


def a_row() -> dict[str, Any]:
    return next(rows(1, "train", limit=1, options={"tasks": {"chain_sum": {"max_terms": 2}}}))


@needs_package
def test_a_wrong_answer_may_be_corrected_and_the_best_one_counts() -> None:
    row, environment = a_row(), ReasoningGymEnvironment(max_attempts=4)
    environment.reset(row, 1)
    steps = [environment.step(text) for text in ("none", "<answer>-77</answer>", f"<answer>{row['answer']}</answer>")]
    assert steps[0].observation == "No answer was found in the response. Try again."
    assert steps[1].observation == "That is not right. Try again."
    assert steps[2].observation == "That is right."
    assert [step.is_done for step in steps] == [False, False, True]
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    assert steps[2].components == {"correct": 1.0, "attempts": 3.0}


@needs_package
def test_the_last_attempt_ends_the_episode_and_cannot_lose_what_an_earlier_one_earned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = ReasoningGymEnvironment(max_attempts=3, extract="whole", reveal=True)
    scores = iter([0.0, 0.25, 0.75, 0.5])  # the first: of nothing, when the row is looked at
    monkeypatch.setattr(environment._scorer, "score", lambda _: {"value": next(scores)})
    environment.reset({}, 1)
    steps = [environment.step("x") for _ in range(3)]
    assert [step.reward for step in steps] == [0.25, 0.5, 0.0]
    assert [step.is_done for step in steps] == [False, False, True]
    assert steps[0].observation == "That is not right. The score is 0.25. Try again."


@needs_package
def test_a_row_of_another_generator_is_a_failure_at_once() -> None:
    with pytest.raises(CannotJudge, match="the row has no reasoning-gym task"):
        ReasoningGymEnvironment().reset({"prompt": "?"}, 1)


@needs_package
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 64, not 0"),
        ({"max_attempts": True}, "from 1 to 64, not True"),
        ({"max_attempts": 65}, "a whole number from 1 to 64"),
        ({"extract": "first"}, "`extract` must be `tag`, `last_line` or `whole`, not 'first'"),
    ],
)
def test_options_that_cannot_be_used_say_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        ReasoningGymEnvironment(**options)
    assert words in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install 'areal-like\\[reasoning-gym\\]'"):
        ReasoningGymEnvironment()
