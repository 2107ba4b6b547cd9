"""Claims about a user's function as a scorer: what it is called with, what its result means, when it is refused."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

import pytest

from areal_like.errors import UserError
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.user_function import UserFunctionScorer, as_components, find_function

SAMPLE = ScorerInput(row={"answer": 4}, response="is 4", finish_reason="length", num_tokens=7)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's module, to be filled by a test."""
    made = types.ModuleType("my_rewards_module")
    monkeypatch.setitem(sys.modules, "my_rewards_module", made)
    return made


def test_function_gets_the_sample_and_its_options(module: Any) -> None:
    seen: list[Any] = []

    def score(row: Any, response: str, *, finish_reason: str, num_tokens: int, scale: float) -> float:
        seen.append((row, response, finish_reason, num_tokens, scale))
        return 2.0

    module.score = score
    scorer = UserFunctionScorer("my_rewards_module:score", {"scale": 0.5})
    assert scorer.score(SAMPLE) == {"value": 2.0}
    assert seen == [({"answer": 4}, "is 4", "length", 7, 0.5)]
    assert scorer.is_deterministic
    assert scorer.version.startswith("user-")
    score.is_deterministic = False  # type: ignore[attr-defined]
    assert not UserFunctionScorer("my_rewards_module:score", {"scale": 0.5}).is_deterministic


def test_async_functions_share_one_loop_from_sample_to_sample(module: Any) -> None:
    loops: list[Any] = []

    async def score(row: Any, response: str, **info: Any) -> float:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return 1.0

    module.score = score
    scorer = UserFunctionScorer("my_rewards_module:score", {})
    assert [scorer.score(SAMPLE), scorer.score(SAMPLE)] == [{"value": 1.0}] * 2
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("result", "components"),
    [
        (1.5, {"value": 1.5}), (None, {"value": None}), ({"value": 1, "a": 2}, {"value": 1, "a": 2}),
        ({"reward": 1, "a": 2}, {"value": 1, "a": 2}), ({"value": 1, "reward": 2}, {"value": 1, "reward": 2}),
        ({"a": 2}, {"value": None, "a": 2}), ([1], {"value": [1]}),
    ],
)  # fmt: skip
def test_result_is_a_number_or_parts_with_a_value_or_a_reward(result: Any, components: dict[str, Any]) -> None:
    assert as_components(result) == components


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "`plain` is neither a built-in scorer nor of the form module:function"),
        (":score", "`:score` is neither a built-in scorer nor of the form module:function"),
        ("my_rewards_module:", "`my_rewards_module:` is neither a built-in scorer nor of the form module:function"),
        ("my_rewards_module:none", "has no attribute none"), ("my_rewards_module:number", "is not callable"),
        ("my_rewards_module:number.deep", "has no attribute number.deep"),
        ("no_such_module_here:score", r"cannot be imported \(ModuleNotFoundError"),
        ("my_rewards_module:narrow", "cannot be called with the required arguments"),
    ],
)  # fmt: skip
def test_function_that_cannot_be_used_says_why(name: str, words: str, module: Any) -> None:
    module.number = 3
    module.narrow = lambda row, response: 1.0
    with pytest.raises(UserError, match=words) as raised:
        find_function(name, {})
    assert raised.value.where == f"reward scorer {name}"


def test_function_may_be_an_attribute_of_something_in_the_module(module: Any) -> None:
    class Rewards:
        @staticmethod
        def score(row: Any, response: str, **info: Any) -> float:
            return 1.0

    module.Rewards = Rewards
    assert find_function("my_rewards_module:Rewards.score", {}) is Rewards.score
    module.size = len
    with pytest.raises(UserError, match="cannot be called"):
        find_function("my_rewards_module:size", {})


@pytest.mark.parametrize(
    ("parameters", "system"),
    [("queries, prompts, labels, **more", "OpenRLHF"), ("completions, prompts, **more", "TRL"),
     ("data_source, solution_str, **more", "verl")],
)  # fmt: skip
def test_function_of_another_system_is_recognised_by_its_first_parameters(
    parameters: str, system: str, module: Any
) -> None:
    exec(f"def score({parameters}): return 1.0", module.__dict__)
    with pytest.raises(UserError) as raised:
        find_function("my_rewards_module:score", {})
    assert f"written for {system}, write one that calls it" in raised.value.remedy


def test_names_of_another_system_further_back_are_the_users_own(module: Any) -> None:
    exec("def score(row, response, prompts=None, **more): return 1.0", module.__dict__)
    find_function("my_rewards_module:score", {})


@pytest.mark.parametrize("option", ["row", "response", "finish_reason", "num_tokens"])
def test_option_named_as_what_is_passed_anyway_is_refused(option: str, module: Any) -> None:
    module.score = lambda *_, **__: 1.0
    with pytest.raises(UserError, match=f"the option name {option} is reserved"):
        UserFunctionScorer("my_rewards_module:score", {option: 1})


def test_function_without_a_source_file_has_a_version_all_the_same(module: Any) -> None:
    exec("def score(row, response, **more): return 1.0", module.__dict__)
    assert UserFunctionScorer("my_rewards_module:score", {}).version == "user"
