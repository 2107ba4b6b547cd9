"""What is wrong with an environment is one sentence, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.errors import UserError
from services.environment.loading import check_environment, find_environment


@pytest.mark.parametrize("kind", ["guess_number", "tool_sum"])
def test_tasks_of_the_shipped_configs_are_environments(kind: str) -> None:
    check_environment(kind, {})
    with pytest.raises(UserError, match=rf"the options of {kind} are not valid \(unknown: size\)"):
        check_environment(kind, {"size": 3})


def test_each_episode_has_an_object_of_its_own_with_the_options() -> None:
    make = find_environment("environment_zoo:Counter", {"most": 5})
    first, second = make(), make()
    assert first is not second
    assert first.most == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("guess_nummber", {}, "there is no environment `guess_nummber` -> did you mean guess_number"),
        (
            "chess",
            {},
            "there is no environment `chess` -> guess_number, tool_sum, tools, openenv, textarena, gymnasium, "
            "reasoning_gym, or",
        ),
        ("no_such_module:A", {}, "module no_such_module cannot be imported"),
        ("environment_zoo:Conter", {}, "has no attribute Conter -> did you mean environment_zoo:Counter"),
        ("environment_zoo:kept", {}, "environment_zoo:kept is not callable"),
        ("environment_zoo:NoStep", {}, "has no method `step`"),
        (
            "environment_zoo:OtherStep",
            {},
            "`step` of environment_zoo:OtherStep cannot be called with the required arguments",
        ),
        (
            "environment_zoo:Counter",
            {"least": 3},
            "the options of environment_zoo:Counter are not valid (unknown: least)",
        ),
    ],
)
def test_what_cannot_be_used_says_why(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_environment(kind, options)
    assert words in str(caught.value)
