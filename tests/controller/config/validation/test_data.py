"""Settings of the rows, and of what ends answers, that cannot work together."""

from __future__ import annotations

import re
from typing import Any

import pytest
from valid_config import make

from areal_like.errors import UserError
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check

CHAT = {"tokenizer": "chat:tool_sum"}


def found(config: RunConfig) -> list[str]:
    return [str(problem) for problem in cross_check(config)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__train": {"generator": "tool_sum", "system_prompt": "x"}}, "data.train.system_prompt.*has none"),
        (
            {"data__train": {"generator": "tool_sum", "chat_template_kwargs": {"tools": 1}}},
            "chat_template_kwargs.tools.*sets this argument of the chat template itself",
        ),
        (
            {"data__train": {"generator": "tool_sum", "system_prompt": "x"}, "rollout__prompt_template": "{prompt}"},
            "system_prompt.*rollout.prompt_template replaces",
        ),
        (
            {"data__train": {"generator": "tool_sum", "system_prompt": "x"}, "rollout__workflow": "agent"},
            "system_prompt.*whose programs create the messages",
        ),
        (
            {"data__eval": None, "data__red_team": {"generator": "running_sum"}},
            "data.red_team.*evaluated together with data.eval, which is not set",
        ),
        (
            {
                "data__red_team": {"generator": "running_sum"},
                "data__eval": None,
                "data__eval_sets": {"red_team": {"generator": "running_sum"}},
            },
            "eval_sets.red_team: this name is reserved for the set data.red_team",
        ),
        (
            {"data__eval_sets": {"a b": {"generator": "running_sum"}}},
            "data.eval_sets.a b: `a b` cannot be used in metric names",
        ),
        (
            {"rollout__red_team": {"refusals": ["no"]}},
            "rollout.red_team.*has no effect without data.red_team",
        ),
        (
            {
                "data__red_team": {"generator": "running_sum"},
                "early_stop": {"metric": "red_team_unsafe"},
                "eval__every_steps": 20,
            },
            "early_stop.mode.*more of red_team_unsafe is worse.*set early_stop.mode: min",
        ),
        ({"early_stop": {}}, "early_stop: this key requires evaluations"),
        (
            {"early_stop": {"metric": "acuracy"}, "eval__every_steps": 20},
            "early_stop.metric: no evaluation provides the metric `acuracy`.*accuracy",
        ),
        (
            {"trainer__checkpoint": {"best": {}, "every_steps": 20}, "eval__every_steps": 30},
            "checkpoint.best: this key requires a checkpoint of every evaluated version",
        ),
        ({"eval__num_samples": 4}, "eval.num_samples.*greedy policy to one prompt are identical"),
        ({"data__eval_sets": {"a": {"generator": "running_sum"}}}, "eval_sets.*are mutually exclusive"),
        ({"sampling__stop": ["x"], "rollout__workflow": "tools"}, "sampling.stop.*only the model ends a turn"),
        ({"sampling__stop": ["x"], "sampling__forced_lengths": "5"}, "sampling.stop.*forced lengths"),
        (
            {
                "sampling__stop": ["x"],
                "rollout__engine": {"kind": "sglang", "max_context": 2048, "sglang": {"routed_experts": True}},
            },
            "sampling.stop.*routed_experts requires that the server ends answers",
        ),
    ],
)
def test_settings_that_cannot_work_together_are_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    problems = found(make(**changes))
    assert any(re.search(words, problem) for problem in problems), problems


def test_stop_strings_and_their_bounds() -> None:
    assert found(make(sampling__stop=["</answer>"])) == []
    for wrong in ([""], ["x" * 257], ["x"] * 65, "x"):
        with pytest.raises(ValueError, match="stop"):
            make(sampling__stop=wrong)


def test_emulated_devices_do_not_look_for_texts() -> None:
    config = make(sampling__stop=["x"])
    assert (config.train_sampling.stop, config.eval_sampling.stop) == (("x",), ("x",))


def test_keys_of_a_set_are_checked_as_those_of_a_source() -> None:
    sets = ["data.eval={a: {generator: running_sum, limt: 3}}"]
    with pytest.raises(
        UserError, match=r"data\.eval_sets\.a\.limt: no such key -> did you mean data\.eval_sets\.a\.limit"
    ):
        load_config("quickstart", sets)
    config = load_config("quickstart", ["data.eval_sets={a: {generator: running_sum}}", "data.eval=null"]).config
    assert config.eval.every_steps == 20, "sets are evaluated although data.eval is not set"
    config = load_config("quickstart", ["data.eval=null"]).config
    assert config.eval.every_steps == 0
