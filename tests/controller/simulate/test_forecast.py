"""Claims about hours before a run: the simulator on the config's own GPUs and split, or one reason why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from valid_config import make

from areal_like.decoder_shape import PUBLIC_SHAPES
from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.simulate.forecast import assumed_lengths, forecast

SHAPE = PUBLIC_SHAPES["Qwen/Qwen3-1.7B"]


def run(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-1.7B", "dtype": "bfloat16"}, "hardware__gpu": "h100", "num_steps": 100,
        "rollout": {"num_workers": 6, "engine": {"kind": "sglang", "device": "cuda", "max_context": 1024}},
        "trainer": {"device": "cuda:6", "backend": "fsdp", "ranks": 2}, "groups_per_step": 16,
        "sampling__max_new_tokens": 512,
    }  # fmt: skip
    return make(**{**settings, **changes})


def test_hours_are_those_of_the_configs_own_split() -> None:
    found = forecast(run(), SHAPE)
    assert (found.gpus, found.gpu) == (8, "h100")
    assert found.hours == pytest.approx(found.step_s * 100 / 3600)
    assert found.gpu_hours == 8 * found.hours
    fewer = {"num_workers": 2, "engine": {"kind": "sglang", "device": "cuda", "max_context": 1024}}
    assert forecast(run(rollout=fewer), SHAPE).gpus == 4


def test_answers_are_the_configs_or_those_given() -> None:
    assert forecast(run(), SHAPE).lengths == "log-normal 170"
    longer = dataclasses.replace(assumed_lengths(run()), mean=400.0)
    assert forecast(run(), SHAPE, longer).step_s > forecast(run(), SHAPE).step_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hardware__gpu": None}, "hardware.gpu: h100"),
        ({"trainer": {"device": "cpu"}}, "must both run on GPUs"),
    ],
)
def test_what_cannot_be_simulated_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        forecast(run(**changes), SHAPE)
