"""The recipes for programs and for reasoning-gym on a CPU: real rows, real judges, a tiny model, several real steps."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]


def check_steps(run):
    """Three updates by rewards that differ; every sample got its verdict, none was dropped."""
    assert run.wait() == 0, run.output
    steps = run.metrics("step")
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(step["reward_std"] > 0 for step in steps)
    assert run.summary["audit"] == "clean"
    assert (run.summary["samples_consumed"], run.summary["samples_dropped"]) == (96, 0)


def test_programs_for_real_mbpp_rows_are_judged_and_give_a_gradient(areal, published):
    rows = published("code/mbpp_nontest.jsonl")
    run = areal(
        "train", str(REPOSITORY / "configs" / "code_tiny.yaml"), f"data.train.path={rows}", f"data.eval.path={rows}",
        "num_steps=3", "data.eval.limit=4", "metrics.report=false",
    )  # fmt: skip
    check_steps(run)
    assert run.summary["accuracy_after"] == 0.0  # tests passed, not the shaping that makes the reward


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra `reasoning-gym` is not installed")
def test_tasks_of_reasoning_gym_are_judged_and_give_a_gradient(areal):
    run = areal(
        "train", str(REPOSITORY / "configs" / "reasoning_gym_tiny.yaml"), "num_steps=3", "data.train.limit=200",
        "data.eval.limit=8", "metrics.report=false",
    )  # fmt: skip
    check_steps(run)
