"""The main job with a trainer of two ranks: it is one trainer, and it ends as one.

That its steps are those of one process, and so learn what one process learns, is proved by tests/trainer/test_ranks.py
for every backend.
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from importlib.util import find_spec

import pytest
import yaml

pytestmark = pytest.mark.e2e
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
FEW = ["warm_start=null"]
"""What it learns is no matter here, and the warm start is made by another stream of tests at this time."""


@pytest.mark.thorough
def test_run_of_two_ranks_goes_on_with_one_and_back(areal, quickstart, short):
    """`resume` after a change of config.yaml: the checkpoint is the same for all backends."""
    run = areal("train", quickstart, *short[1:], *FEW, "num_steps=400", "trainer.backend=fsdp", "trainer.ranks=2")
    run.wait_for_step(3)
    run.process.terminate()
    assert run.wait() == 0, run.output
    folder = run.folder
    file = folder / "config.yaml"
    for changed in ({"backend": "torch", "ranks": 1}, {"backend": "auto", "ranks": 2}):
        config = yaml.safe_load(file.read_text())
        config["trainer"] |= changed
        file.write_text(yaml.safe_dump(config))
        wanted = max(row["step"] for row in run.metrics("step")) + 2
        again = areal("resume", str(folder))
        again.wait_until(partial(_has_step, run, wanted), f"step {wanted}")
        again.process.terminate()
        assert again.wait() == 0, again.output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["audit"] == "clean"
    assert summary["lives"] == 3


def _has_step(run, step):
    return any(row["step"] >= step for row in run.metrics("step"))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(["trainer.backend=fsdp"], id="fsdp"),
        pytest.param(
            ["trainer.backend=deepspeed", "trainer.deepspeed.stage=1"],
            id="zero-1",
            marks=[needs_deepspeed, pytest.mark.thorough],
        ),
    ],
)
def test_killed_rank_and_then_the_killed_group_go_back_to_a_checkpoint_and_the_run_goes_on(
    backend, areal, quickstart, short
):
    run = areal(
        "train", quickstart, *short[1:], *FEW, *backend, "trainer.ranks=2", "num_steps=4000",
        "trainer.checkpoint.every_steps=2",
    )  # fmt: skip
    run.wait_for_step(5)
    one_life = pids_of_ranks(run)
    os.kill(one_life[1], signal.SIGKILL)
    run.wait_until(lambda: run.output.count("the trainer restarts from version") == 1, "a restart")
    run.wait_for_step(max(row["step"] for row in run.metrics("step")) + 1)  # replayed steps have a row already
    next_life = pids_of_ranks(run)
    assert not set(one_life) & set(next_life), "both ranks are new"
    for pid in next_life:
        os.kill(pid, signal.SIGKILL)
    run.wait_until(lambda: run.output.count("the trainer restarts from version") == 2, "another restart")
    run.wait_for_step(max(row["step"] for row in run.metrics("step")) + 1)
    run.process.terminate()
    assert run.wait() == 0, run.output
    assert "trainer-1: ended with signal SIGKILL" in run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["trainer_restarts"] == 2, "the death of a group is one restart"
    steps = [row["step"] for row in run.metrics("step")]
    assert steps == list(range(1, run.summary["steps"] + 1)), "no step is reported twice"


def pids_of_ranks(run) -> tuple[int, int]:
    return run.pid_of("trainer", "/trainer.json"), run.pid_of("trainer", "/trainer-1.json")


@pytest.mark.parametrize("victim", [pytest.param("trainer.json", marks=pytest.mark.thorough), "trainer-1.json"])
def test_killed_rank_without_a_budget_ends_the_run_with_its_name_and_no_process_stays(victim, areal, quickstart, short):
    two = ["trainer.backend=fsdp", "trainer.ranks=2", "trainer.max_restarts=0"]
    run = areal("train", quickstart, *short[1:], *FEW, *two, "num_steps=400")
    run.wait_for_step(1)
    family = run.family()
    os.kill(run.pid_of("trainer", f"/{victim}"), signal.SIGKILL)
    assert run.wait() == 1, run.output
    assert f"{victim.removesuffix('.json')}: ended with signal SIGKILL" in run.output
    assert run.survivors(family, 15.0) == []


def test_samples_of_a_step_need_not_be_a_multiple_of_the_ranks(areal, quickstart, short):
    odd = ["groups_per_step=5", "group_size=3", "trainer.mini_batches=2"]
    run = areal("train", quickstart, *short, *FEW, *odd, "trainer.backend=fsdp", "trainer.ranks=2")
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert {row["num_samples"] for row in run.metrics("step")} == {15}
    assert {path.name for path in (run.folder / "logs").glob("trainer*.log")} == {"trainer.log", "trainer-1.log"}
    setup = json.loads((run.folder / "trainer.json").read_text())
    assert (setup["ranks"], setup["backend"]) == (2, "fsdp")


@needs_deepspeed
@pytest.mark.thorough
def test_option_that_zero_does_not_know_is_reported_in_one_sentence(areal, quickstart, short):
    raw = "trainer.deepspeed.raw={zero_optimization: {reduce_bucket_sise: 5}}"
    run = areal("train", quickstart, *short, *FEW, "trainer.backend=deepspeed", "trainer.ranks=2", raw)
    assert run.wait() == 2, run.output
    assert "ZeRO does not accept reduce_bucket_sise" in run.output
    assert "did you mean reduce_bucket_size?" in run.output
