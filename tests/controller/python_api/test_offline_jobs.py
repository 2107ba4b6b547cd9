"""`sft`, `dpo` and `reward_model` start the right command, and refuse mistakes in the command line's words."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal_like
from areal_like.errors import UserError
from controller.config.offline_config import OfflineConfig
from controller.config.problems import ConfigError
from controller.python_api import controller_process

CONFIG = {"model": {"init": {"model_type": "qwen3"}, "tokenizer": "bytes"}, "data": {"train": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("function", "command"),
    [(areal_like.sft, "sft"), (areal_like.dpo, "dpo"), (areal_like.reward_model, "reward-model")],
)
def test_each_function_starts_its_command_with_the_overrides(started, function, command):
    run = function("offline/sft", max_steps=3, model__path=Path("final"), trainer__lora={"rank": 4})
    assert started[0].arguments == [
        command, "offline/sft", "max_steps=3", 'model.path="final"', 'trainer.lora={"rank": 4}'
    ]  # fmt: skip
    assert run.status.state == "finished"


@pytest.mark.parametrize("make", [lambda data: data, OfflineConfig.model_validate])
def test_dict_and_config_object_are_passed_on_whole(started, make):
    config = make(CONFIG)
    areal_like.dpo(config, batch_size=3)
    [call] = started
    assert call.arguments == ["dpo", controller_process.CONFIG, "batch_size=3"]
    assert call.data == (config if isinstance(config, dict) else config.model_dump(mode="json"))
    assert CONFIG["data"] == {"train": "rows.jsonl"}


def test_mistakes_are_raised_before_anything_starts(started):
    with pytest.raises(ConfigError, match=r"trainer.optimizer.learning_rate: no such key"):
        areal_like.sft("offline/sft", trainer__optimizer__learning_rate=1)
    with pytest.raises(ConfigError, match=r"epochs: the value must be greater than 0, not 0"):
        areal_like.reward_model(CONFIG, epochs=0)
    assert not started


@pytest.mark.parametrize("config", ["quickstart", {"data": {"train": {"path": "rows.jsonl"}}}])
def test_a_config_with_rollouts_is_refused(started, config):
    with pytest.raises(UserError, match=r"data.train is not a file, so this is the config of a run with rollouts"):
        areal_like.sft(config)
    assert not started
