"""The environment `gymnasium` with environments of the real package."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from areal_like.environment import InvalidStep, Step, as_step
from areal_like.errors import UserError
from services.environment.adapters import actions
from services.environment.adapters.gymnasium import GymnasiumEnvironment

needs_package = pytest.mark.skipif(find_spec("gymnasium") is None, reason="the `gymnasium` extra is not installed")
LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}


def checked(step: Step) -> Step:
    return as_step(step, is_reset=False, max_bytes=10_000)


@needs_package
def test_names_are_actions_and_drawings_mark_the_agent() -> None:
    environment = GymnasiumEnvironment(**LAKE, correct_at=1.0)
    assert environment.reset({}, 1) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    steps = [
        checked(environment.step(word)) for word in [" Down \n", "down", "jump", "right", "", "down", "right", "right"]
    ]
    assert steps[0].observation == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert steps[2].observation == "'jump' is no action. The actions are left, down, right, up."
    assert steps[4].observation == "There is no action. The actions are left, down, right, up."
    assert [(step.reward, step.is_done) for step in steps] == [(0.0, False)] * 7 + [(1.0, True)]
    assert steps[-1].components == {"correct": 1.0, "invalid_actions": 2.0, "truncated": 0.0}
    environment.close()


@needs_package
def test_a_seed_begins_alike_and_values_are_json() -> None:
    def played(seed: int) -> list[str]:
        environment = GymnasiumEnvironment(id="Blackjack-v1", pattern=r"(\d)\D*$")
        return [environment.reset({}, seed), checked(environment.step("I have 20, so 0.")).observation]

    assert played(2**62) == played(2**62)
    assert played(2**62)[0].startswith("[")
    assert len({tuple(played(seed)) for seed in range(5)}) > 1


@needs_package
def test_nested_colours_are_one_mark() -> None:
    assert "[[" not in GymnasiumEnvironment(id="Taxi-v4").reset({}, 5)


class Odd:
    """An environment of texts that says what a test wants."""

    def __init__(self, **says: Any) -> None:
        import gymnasium

        self.observation_space, self.action_space = gymnasium.spaces.Text(100), gymnasium.spaces.Text(3)
        self.metadata: dict[str, Any] = {}
        self.render_mode = None
        self._says = {"reward": 1.0, "terminated": False, "truncated": False, "info": {}, **says}

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[Any, ...]:
        if self._says.get("raises"):
            raise RuntimeError(action)
        return f"you said {action}", *(self._says[name] for name in ("reward", "terminated", "truncated", "info"))


def odd(monkeypatch: pytest.MonkeyPatch, **says: Any) -> GymnasiumEnvironment:
    import gymnasium

    monkeypatch.setattr(gymnasium, "make", lambda *_, **__: Odd(**says))
    environment = GymnasiumEnvironment(id="Odd-v0")
    assert environment.reset({}, 3) == "seed 3"
    return environment


@needs_package
def test_texts_are_actions_as_far_as_the_space_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = odd(monkeypatch, info={"is_success": np.True_}, reward=np.float32(0.5), truncated=np.True_)
    assert checked(environment.step("abcd")).observation == (
        "'abcd' is no action. Write a text that the environment accepts."
    )
    step = checked(environment.step("abc"))
    assert (step.observation, step.reward, step.is_done) == ("you said abc", 0.5, True)
    assert step.components == {"correct": 1.0, "invalid_actions": 1.0, "truncated": 1.0}


@needs_package
@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"reward": None}, "its reward is not a finite number but None"),
        ({"reward": float("inf")}, "its reward is not a finite number but inf"),
        ({"terminated": "no"}, "its `done` is not true or false but str"),
        ({"truncated": 1}, "its `done` is not true or false but int"),
    ],
)
def test_an_environment_that_lies_has_no_reward(monkeypatch: pytest.MonkeyPatch, says: Any, words: str) -> None:
    with pytest.raises(InvalidStep, match=words):
        checked(odd(monkeypatch, **says).step("abc"))
    with pytest.raises(RuntimeError):
        odd(monkeypatch, raises=True).step("abc")


@needs_package
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "Pendulum-v1"}, "reward.environment.options.id: the action space of Pendulum-v1 is Box"),
        ({"id": "Nope-v1"}, "Nope-v1 cannot be created (NameNotFound"),
        ({"id": "CartPole-v1", "observe": "drawing"}, "CartPole-v1 does not support the render mode ansi"),
        ({"id": "CartPole-v1", "observe": "picture"}, "observe must be auto, drawing or values, not 'picture'"),
        (
            {"id": "CartPole-v1", "actions": ["left"]},
            "CartPole-v1 has 2 actions, but ['left'] does not list each of them once",
        ),
        ({"id": "CartPole-v1", "actions": ["a", "A"]}, "does not list each of them once"),
        ({"id": "CartPole-v1", "pattern": "("}, "'(' is not a valid regular expression"),
        ({"id": "CartPole-v1", "make": {"speed": 3}}, "CartPole-v1 cannot be created (TypeError"),
    ],
)
def test_an_environment_that_cannot_be_played_says_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        GymnasiumEnvironment(**options)
    assert words in str(caught.value)


@needs_package
def test_names_for_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium

    monkeypatch.setattr(gymnasium, "make", lambda *_, **__: Odd())
    with pytest.raises(UserError, match="Odd-v0 has a text action space"):
        GymnasiumEnvironment(id="Odd-v0", actions=["a"])


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        GymnasiumEnvironment(id="FrozenLake-v1")
    assert str(caught.value) == (
        "reward.environment.kind: the package gymnasium is not installed -> pip install 'areal-like[gymnasium]'"
    )
