"""What does not go together with weights by a process group is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.engines import group_problems
from controller.config.validation.run import cross_check

GROUP = {"kind": "distributed"}


def test_distributed_weights_are_accepted() -> None:
    assert cross_check(make(trainer__weights=GROUP)) == []
    assert cross_check(make(trainer__weights={**GROUP, "group": {"backend": "gloo", "bucket_mb": 1}})) == []
    assert cross_check(make(trainer__weights=GROUP, rollout__engine={"kind": "sglang"})) == []


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"trainer__weights": {**GROUP, "delta": {}}}, "trainer.weights.delta", "whole"),
        ({"trainer__weights": {**GROUP, "swap": "rolling"}}, "trainer.weights.swap", "at once"),
        ({"trainer__weights": GROUP, "rollout__interruption": "drain"}, "rollout.interruption", "would wait for it"),
        ({"trainer__weights": {**GROUP, "group": {"backend": "nccl"}}}, "trainer.weights.group.backend", "GPUs"),
        (
            {"trainer__weights": GROUP, "rollout__engine": {"kind": "sglang", "device": "cuda"}},
            "trainer.weights.kind",
            "on a GPU",
        ),
        (
            {"trainer__weights": GROUP, "rollout__engine": {"kind": "sglang", "sglang": {"tp_size": 2}}},
            "trainer.weights.kind",
            "with tp_size 1",
        ),
        ({"trainer__weights": {"group": {"bucket_mb": 1}}}, "trainer.weights.group", "no effect with kind shm"),
    ],
)
def test_contradiction_with_a_process_group_is_refused(changes: dict[str, Any], key: str, words: str) -> None:
    (problem,) = cross_check(make(**changes))
    assert problem.keys[0] == key
    assert words in str(problem)
    assert problem.remedy


def test_one_step_off_drains_and_is_refused_too() -> None:
    problems = cross_check(make(trainer__weights=GROUP, mode="one_step_off"))
    assert [problem.keys[0] for problem in problems] == ["rollout.interruption"]


def test_a_model_whose_layout_inside_a_server_is_not_known_takes_streams() -> None:
    config = make(trainer__weights=GROUP, rollout__engine={"kind": "sglang"})
    assert list(group_problems(config, {"model_type": "qwen3"})) == []
    (problem,) = group_problems(config, {"model_type": "gemma3_text"})
    assert problem.keys[0] == "trainer.weights.kind"
    assert "gemma3_text" in str(problem)
