"""What counts as an environment's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.environment import NoStep, Step, as_step


@pytest.mark.parametrize(
    ("returned", "is_reset", "step"),
    [
        (None, True, Step()),
        ("go", True, Step(observation="go")),
        (("wall", 1, np.True_), False, Step(observation="wall", reward=1.0, is_done=True)),
        (Step(observation="x", components={"correct": 1}), False, Step(observation="x", components={"correct": 1.0})),
        (("\ud800", 0.0, False), False, Step(observation="?")),
        (Step(components={"\ud800": 1.0}), False, Step(components={"?": 1.0})),
        (("", -3.3e38, False), False, Step(reward=-3.3e38)),
        ((None, np.float32(0.5), False), False, Step(reward=0.5)),
    ],
)
def test_what_an_environment_may_return(returned: Any, is_reset: bool, step: Step) -> None:
    assert as_step(returned, is_reset=is_reset, max_bytes=8) == step


@pytest.mark.parametrize(
    ("returned", "is_reset", "words"),
    [
        (None, False, "returned NoneType instead of"),
        ("go", False, "returned str instead of"),
        (("go", 1.0), False, "returned tuple instead of"),
        (("go", 1.0, "yes"), False, "its done is not true or false but str"),
        (("go", 1.0, 1), False, "its done is not true or false but int"),
        (("go", float("nan"), True), False, "its reward is not a finite number but nan"),
        (("go", "1.0", True), False, "its reward is not a finite number"),
        (("go", None, True), False, "its reward is not a finite number"),
        ((b"go", 1.0, True), False, "its observation is not text but bytes"),
        (("é" * 5, 1.0, True), False, "its observation has 10 bytes, more than 8"),
        (("go", -3.5e38, True), False, "its reward -3.5e\\+38 is beyond float32"),
        (Step(is_done=True), True, "was done before the first action"),
        (Step(reward=-0.5), True, "gave a reward of -0.5 before the first action"),
        (Step(components={"a": float("inf")}), False, "its component 'a' is not a finite number"),
        (Step(components={str(number): 0.0 for number in range(65)}), False, "gave 65 components"),
        (Step(components=[1.0]), False, "its components are not a dict but list"),
    ],
)
def test_what_is_no_answer_is_never_a_zero(returned: Any, is_reset: bool, words: str) -> None:
    with pytest.raises(NoStep, match=words):
        as_step(returned, is_reset=is_reset, max_bytes=8)


def test_the_digest_tells_every_part_that_a_policy_or_a_reward_sees() -> None:
    base = Step(observation="a", reward=0.5)
    others = [
        Step(observation="b", reward=0.5),
        Step(observation="a", reward=0.25),
        Step(observation="a", is_done=True),
    ]
    assert base.digest == Step(observation="a", reward=0.5, components={"x": 1.0}).digest
    assert base.digest not in {other.digest for other in others}
