"""What counts as an environment's answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.environment import InvalidStep, Step, as_step, num_action_chars
from areal_like.tool_call import ToolCall


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
        (("go", 1.0, "yes"), False, "its `done` is not true or false but str"),
        (("go", 1.0, 1), False, "its `done` is not true or false but int"),
        (("go", float("nan"), True), False, "its reward is not a finite number but nan"),
        (("go", "1.0", True), False, "its reward is not a finite number"),
        (("go", None, True), False, "its reward is not a finite number"),
        ((b"go", 1.0, True), False, "its observation is not text but bytes"),
        (("é" * 5, 1.0, True), False, "its observation has 10 bytes, more than 8"),
        (("go", -3.5e38, True), False, "its reward -3.5e\\+38 is outside the range of float32"),
        (Step(is_done=True), True, "is done before the first action"),
        (Step(reward=-0.5), True, "gave a reward of -0.5 before the first action"),
        (Step(components={"a": float("inf")}), False, "its component 'a' is not a finite number"),
        (Step(components={str(number): 0.0 for number in range(65)}), False, "returned 65 components"),
        (Step(components=[1.0]), False, "its components are not a dict but list"),
        (3, True, "returned int instead of text, a Step or None"),
        (("go", 1.0, False, 2), False, r"instead of \(observation, reward, done\) or a Step"),
        (("go", 3.5e38, True), False, "range of float32 \\(at most 3.4e\\+38\\)"),
        (("go", b"1", True), False, "its reward is not a finite number but b'1'"),
        (("go", 10**400, True), False, "its reward is not a finite number but 1000"),
        (Step(results="ab"), False, "its results are not a list of strings"),
        (Step(results=("a", 1)), False, "its results are not a list of strings"),
        (Step(results=("é" * 4, "b")), False, "its results have 9 bytes, more than 8"),
        (Step(observation="12345", results=("678", "9")), False, "its results have 4 bytes, more than 3"),
        (Step(tools={"a": 1}), True, "its tools are not a list of dicts"),
        (Step(tools=("a",)), True, "its tools are not a list of dicts"),
        (Step(tools=({"a": object()},)), True, "its tools are not JSON"),
        (Step(tools=({"a": 12},)), True, "its tools have 10 bytes, more than 8"),
    ],
)
def test_what_is_no_answer_is_never_a_zero(returned: Any, is_reset: bool, words: str) -> None:
    with pytest.raises(InvalidStep, match=words):
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


def test_answer_of_exactly_the_allowed_size_is_taken() -> None:
    step = Step(observation="1234", results=("56", "78"), components={str(number): 0.0 for number in range(64)})
    assert as_step(step, is_reset=False, max_bytes=8) == step
    declared = Step(tools=({"a": 1},))
    assert as_step(declared, is_reset=True, max_bytes=len('[{"a":1}]')) == declared
    assert as_step(("", 3.4e38, False), is_reset=False, max_bytes=2) == Step(reward=3.4e38)
    assert as_step(Step(), is_reset=False, max_bytes=2) == Step()


def test_texts_of_an_answer_can_be_sent() -> None:
    step = as_step(
        Step(results=["a\ud800"], tools=[{"a": (1, 2)}], components={"x" * 200: True}), is_reset=True, max_bytes=99
    )  # type: ignore[arg-type]
    assert step == Step(results=("a?",), tools=({"a": [1, 2]},), components={"x" * 100: 1.0})


def test_fault_of_a_component_is_named_with_the_beginning_of_its_name() -> None:
    with pytest.raises(InvalidStep, match=f"^its component '{'x' * 40}' is not a finite number but {'y' * 40}$"):
        as_step(Step(components={"x" * 200: "y" * 200}), is_reset=False, max_bytes=99)  # type: ignore[dict-item]


def test_size_of_an_action_is_that_of_all_its_texts() -> None:
    assert num_action_chars("abc") == 3
    assert num_action_chars((ToolCall("a", "bc"), ToolCall("", "d", "efg"))) == 7
    assert num_action_chars(()) == 0
