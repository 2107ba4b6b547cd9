"""The README's commands, executed as they are written: the smallest job learns, and a job of the user's own is made,
probed, trained, interrupted, resumed, evaluated and reported.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
NUM_ROWS, NUM_HELD_OUT = 8, 2
TINY = [
    "num_steps=12", "groups_per_step=2", "group_size=2", "sampling.max_new_tokens=2", "reward.timeout_s=1800",
    "rollout.score_timeout_s=3600", "metrics.report=false",
]  # fmt: skip
"""Sizes of the user's job, after the overrides that the README has. The command `report` draws its report."""
SAMPLES_BEFORE_GATE = NUM_HELD_OUT + 2 * 2 * 4
"""Evaluated samples, and those of at least one step and at most four."""
SCORER = """
import os, time

num_calls = 0


def score(row, response, **info):
    global num_calls
    num_calls += 1
    while num_calls > {after} and os.path.exists("gate.closed"):
        time.sleep(0.02)
    return float(len(response) % 2)
"""


def commands() -> dict[str, list[str]]:
    """Commands of the section "Your own job" by name, as words without `areal-like`."""
    block = re.findall(r"^```\n(.*?)^```$", README.partition("## Your own job")[2], re.M | re.S)[0]
    found = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    return {words[0]: words for words in found}


@pytest.fixture
def typed(run_class: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """typed(words, ...) starts `areal-like` in the test's folder with nothing added."""
    started: list[Any] = []

    def start(*words: str) -> Any:
        started.append(run_class(list(words), tmp_path, tmp_path))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.destroy()


def done(run: Any, *statuses: int) -> str:
    """Output of a command that ends with one of the statuses (default 0)."""
    assert run.wait() in (statuses or (0,)), run.output
    return str(run.output)


def test_the_smallest_job_is_trained_to_its_end_and_learns(typed: Callable[..., Any], tmp_path: Path) -> None:
    (line,) = re.findall(r"`areal-like (train own_data)` is the smallest such job", README)
    done(typed(*line.split()))
    folder = tmp_path / "runs" / "own_data"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["audit"]) == (40, "clean")
    assert summary["accuracy_after"] > summary["accuracy_before"]
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows if row["kind"] == "step"]
    assert sum(rewards[-10:]) > 1.5 * sum(rewards[:10])
    page = (folder / "report.html").read_text()
    assert "First held-out prompts" in page
    assert "version 40: <b>scored" in page


def test_the_commands_for_a_job_of_your_own_work_one_after_the_other(typed: Callable[..., Any], tmp_path: Path) -> None:
    words = commands()
    assert list(words) == ["init", "validate", "probe", "train", "resume", "eval", "serve", "simulate"]
    for name, count in (("train", NUM_ROWS), ("heldout", NUM_HELD_OUT)):
        rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    said = done(typed(*words["init"], "--data", "train.jsonl,heldout.jsonl", "--answer", "text"))
    assert "validate mine.yaml found no error" in said
    assert "probing the starting model" in said
    (tmp_path / "mine_reward.py").write_text(SCORER.format(after=SAMPLES_BEFORE_GATE))
    assert "# mine.yaml is valid" in done(typed(*words["validate"]))
    done(typed(*words["probe"], "--prompts", "2", "--samples", "2"), 0, 1)  # 1: the random model's reward is flat

    (tmp_path / "gate.closed").touch()  # holds the run until Ctrl-C has reached it
    run = typed(*words["train"], *TINY)
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.wait_until(lambda: "sav" in run.output or "stop" in run.output, "answer to Ctrl-C")
    (tmp_path / "gate.closed").unlink()
    done(run, 0, 130)
    assert (tmp_path / "runs/first").is_dir()
    assert "12 of 12 steps" in done(typed(*words["resume"]))
    assert json.loads((tmp_path / "runs/first/summary.json").read_text())["lives"] == 2

    assert "Accuracy on 2 held-out prompts is" in done(typed(*words["eval"]))
    assert "has no chat template" in done(typed(*words["serve"], "--port", "0"), 2)  # as the README says of `tiny`
    assert "report: " in done(typed("report", "runs/first"))
    assert "samples/s" in done(typed(*words["simulate"]))
