"""The recipes for programs, for packages of environments and for several models on a CPU: real rows, real judges, real
packages, a tiny model, several real steps."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from ecosystem import interpreter_of
from local_server import listening

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


@pytest.mark.thorough
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


# ---------------------------------------------------------------- environments and graphs: two steps each

DIGITS = list("0123456789")
ENVIRONMENTS = REPOSITORY / "configs" / "environments"
TWO_STEPS = [
    "num_steps=2", "groups_per_step=4", "group_size=4", "data.eval=null", "metrics.report=false",
    "rollout.threads=1", "trainer.threads=1",
]  # fmt: skip


def started(folder: Path, prompts: list[str], answers: list[str]) -> str:
    """A warm start in which the model learns to end its turns: one of `answers`, after any of `prompts`. A model with
    random weights would almost never end one, and its environment would see no action."""
    dice = random.Random(0)
    rows = [{"prompt": dice.choice(prompts), "response": dice.choice(answers)} for _ in range(256)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    optimizer = "{lr: 3.0e-3, warmup_steps: 0, schedule: constant}"
    return f"warm_start={{data: {{path: {file}}}, sft: {{steps: 60, batch_size: 16, optimizer: {optimizer}}}}}"


def any_texts() -> list[str]:
    """Pieces of text of up to 60 characters."""
    words = " ".join((REPOSITORY / "configs" / "gymnasium_tiny.yaml").read_text().split())
    return [words[begin : begin + 8 + begin % 53].strip() for begin in range(0, len(words) - 60, 7)]


def recorded(areal, run) -> list[dict]:
    """The samples of a job of two steps that went right, each trained on once."""
    assert run.wait() == 0, run.output
    assert (run.summary["audit"], run.summary["steps"]) == ("clean", 2)
    assert (run.summary["samples_consumed"], run.summary["groups_dropped"]) == (2 * 16, 0)
    shown = areal("samples", str(run.folder), "--format", "jsonl", "--out", "-", "--limit", "all")
    assert shown.wait() == 0, shown.output
    rows = [json.loads(line) for line in shown.output.splitlines() if line.startswith("{")]
    assert len(rows) == 2 * 16
    return rows


def recipe(name: str) -> str:
    return str(REPOSITORY / "configs" / f"{name}.yaml")


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("gymnasium") is None, reason="the extra `gymnasium` is not installed")
def test_games_of_gymnasium_are_played_and_trained_on(areal, tmp_path):
    start = started(tmp_path, any_texts(), ["0", "1"])
    rows = recorded(areal, areal("train", recipe("gymnasium_tiny"), *TWO_STEPS, start))
    assert any(row["components"]["turns"] for row in rows), "no game saw an action"
    assert len({row["reward"] for row in rows}) > 1, "all games ended alike"


@pytest.mark.thorough
def test_sessions_of_an_openenv_server_are_played_and_trained_on(areal, tmp_path):
    python, server = interpreter_of("openenv"), ENVIRONMENTS / "openenv_guess_number.py"
    with listening(lambda port: [python, str(server), str(port)]) as port:
        url = f"reward.environment.options.url=http://127.0.0.1:{port}"
        start = started(tmp_path, any_texts(), DIGITS)
        rows = recorded(areal, areal("train", recipe("openenv_tiny"), *TWO_STEPS, start, url))
    assert any(row["components"]["turns"] for row in rows), "no game saw an action"
    assert len({row["reward"] for row in rows}) > 1, "all games ended alike"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["judge_sum", "nim_self_play"])
def test_graphs_of_several_models_are_judged_and_trained_on(areal, name):
    start = ["warm_start.sft.steps=60", "warm_start.sft.batch_size=16"]
    rows = recorded(areal, areal("train", recipe(name), *TWO_STEPS, *start))
    assert len({row["reward"] for row in rows}) > 1, "all samples have the same reward"
