"""The environment `textarena` with games of the real package."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from areal_like.environment import InvalidStep, Step, as_step
from areal_like.errors import UserError
from services.environment.adapters import actions
from services.environment.adapters.textarena import TextArenaEnvironment

needs_package = pytest.mark.skipif(find_spec("textarena") is None, reason="the `textarena` extra is not installed")
GUESS = "GuessTheNumber-v0"


def begun(seed: int = 1, name: str = GUESS, **options: Any) -> tuple[TextArenaEnvironment, str]:
    environment = TextArenaEnvironment(id=name, **options)
    return environment, environment.reset({}, seed)


def checked(step: Step) -> Step:
    return as_step(step, is_reset=False, max_bytes=10_000)


@needs_package
def test_a_game_is_won_by_listening_and_only_what_is_new_is_observed() -> None:
    environment, first = begun()
    assert "between 1 and 20" in first
    low, high = 1, 20
    while True:
        middle = (low + high) // 2
        step = checked(environment.step(f"I think [{middle}]"))
        if step.is_done:
            break
        assert step.observation in ("The target number is higher.", "The target number is lower.")
        assert step.reward == 0.0
        low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)
    assert (step.reward, step.components) == (1.0, {"correct": 1.0, "invalid_move": 0.0})


@needs_package
def test_a_lost_game_has_the_reward_that_the_game_gives() -> None:
    environment, _ = begun(game={"max_turns": 1, "max_number": 5}, correct_at=2.0)
    number = environment._game.game_number
    away = [one for one in range(1, 6) if abs(one - number) == 2] + [number - 1 or 2]
    steps = [checked(environment.step(f"[{one}]")) for one in (away[0], away[-1])]
    assert [step.is_done for step in steps] == [False, True]
    step = steps[1]
    assert step.reward == pytest.approx(0.75)
    assert step.components["correct"] == 0.0


@needs_package
@pytest.mark.parametrize("name", [GUESS, "2048-v0-3x3"])
def test_episodes_of_one_process_do_not_disturb_each_other(name: str) -> None:
    """Each can be replayed alone: a game draws from the global generators at any step."""
    moves = ["[1]", "[up]", "[left]", "[2]", "[down]", "[right]"]

    def played(neighbours: int) -> list[str]:
        environment, first = begun(7, name)
        others = [begun(seed, name)[0] for seed in range(neighbours)]
        seen = [first]
        for move in moves:
            for other in others:
                other.step(move)
            random.random()
            np.random.random()
            step = environment.step(move)
            seen.append(f"{step.observation} {step.reward}")
            if step.is_done:
                break
        return seen

    assert played(0) == played(2)


@needs_package
def test_a_game_leaves_the_random_numbers_of_others_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    environment, _ = begun(5)
    environment.step("[4]")
    assert (random.random(), np.random.random()) == expected


class Unsound:
    """A game that ends as a test wants it."""

    def __init__(self, is_done: Any, rewards: Any) -> None:
        self._is_done, self._rewards = is_done, rewards

    def step(self, action: str) -> tuple[Any, dict[str, Any]]:
        return self._is_done, {}

    def close(self) -> tuple[Any, Any]:
        return self._rewards, None

    def get_observation(self) -> tuple[int, list[Any]]:
        return 0, []


@needs_package
@pytest.mark.parametrize(
    ("is_done", "rewards", "words"),
    [
        (True, None, "its reward is not a finite number but None"),
        (True, {}, "its reward is not a finite number but None"),
        (True, {0: float("nan")}, "its reward is not a finite number but nan"),
        ("yes", {0: 1.0}, "its `done` is not true or false but str"),
        (0, None, "its `done` is not true or false but int"),
    ],
)
def test_a_game_that_lies_has_no_reward(is_done: Any, rewards: Any, words: str) -> None:
    environment, _ = begun()
    environment._game = Unsound(is_done, rewards)
    with pytest.raises(InvalidStep, match=words):
        checked(environment.step("[1]"))


@needs_package
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "GuesTheNumber-v0"}, "textarena has no game 'GuesTheNumber-v0' -> did you mean GuessTheNumber-v0"),
        (
            {"id": "KuhnPoker-v0"},
            "KuhnPoker-v0 cannot be started with one player (AssertionError: The number of players",
        ),
        ({"id": GUESS, "game": {"size": 3}}, "GuessTheNumber-v0 cannot be created (TypeError: "),
        ({"id": GUESS, "game": 3}, "game must be a mapping, not 3"),
    ],
)
def test_a_game_that_cannot_be_played_says_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        TextArenaEnvironment(**options)
    assert words in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        TextArenaEnvironment(id=GUESS)
    assert str(caught.value) == (
        "reward.environment.kind: the package textarena is not installed -> pip install 'areal-like[textarena]'"
    )
