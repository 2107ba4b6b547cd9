"""The recipes for programs and for reasoning-gym on a CPU: real rows, real judges, a tiny model, several real steps."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]


def check_steps(run, scorer, limit_reward):
    """The run learned from rewards that differ, and every sample was judged by the scorer that counts."""
    assert run.wait() == 0, run.output
    steps = run.metrics("step")
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(0 < step["reward_mean"] <= limit_reward for step in steps)
    assert run.summary["audit"] == "clean"
    assert run.summary["num_samples"] > 0


def test_programs_for_real_mbpp_rows_are_judged_and_give_a_gradient(areal, published):
    rows = published("code/mbpp_nontest.jsonl")
    run = areal(
        "train", str(REPOSITORY / "configs" / "code_tiny.yaml"), f"data.train.path={rows}", f"data.eval.path={rows}",
        "num_steps=3", "data.eval.limit=4", "metrics.report=false",
    )  # fmt: skip
    check_steps(run, "code", 1.5)


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra `reasoning-gym` is not installed")
def test_tasks_of_reasoning_gym_are_judged_and_give_a_gradient(areal):
    run = areal(
        "train", str(REPOSITORY / "configs" / "reasoning_gym_tiny.yaml"), "num_steps=3", "data.train.limit=200",
        "data.eval.limit=8", "metrics.report=false",
    )  # fmt: skip
    check_steps(run, "reasoning_gym", 1.5)
