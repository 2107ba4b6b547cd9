"""Real runs that go wrong in the four ways of the book, each with the right cause in the first finding.

Two run on emulated GPUs, which take their time asleep, the third waits for its deadlines, and the fourth is judged by
its rewards: none depends on how fast the machine is.
"""

from __future__ import annotations

import textwrap

import pytest
from conftest import START

from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.finding import Finding
from controller.run_folder.run_folder import RunFolder

pytestmark = pytest.mark.e2e

EMULATED = [
    "emulated", "groups_per_step=8", "group_size=4", "num_steps=12", "emulation.mean_tokens=2000",
    "metrics.report=false",
]  # fmt: skip
SMALL = ["group_size=4", "eval.every_steps=0", "data.eval.limit=64", "metrics.report=false", *START]
REWARDS = """
    import random, time

    def hangs(row, response, **info):
        if random.random() < 0.25:
            time.sleep(3600)
        return float("=" in response)
"""


def diagnosed(run) -> list[Finding]:
    """The findings of a run that ended well, printed for the reader of a failed test."""
    assert run.wait() == 0, run.output
    found = diagnose(RunData.load(RunFolder(run.folder)))
    for finding in found:
        print(
            f"[{finding.severity}] {finding.title}\n  {finding.detail}\n  -> {finding.advice}\n  => {finding.predicted}"
        )
    return found


def test_run_with_too_few_rollout_slots_gets_that_finding_first(areal):
    few = ["rollout.num_workers=1", "rollout.engine.num_slots=2", "rollout.queue_samples=16", "name=few"]
    first = diagnosed(areal("train", *EMULATED, "emulation.speedup=40", *few))[0]
    assert "too few rollout workers or slots" in first.title
    assert "The trainer waited" in first.title
    assert "rollout.engine.num_slots from 2 to" in first.advice
    assert first.predicted.startswith("Estimated steps per second: +")


@pytest.mark.thorough
def test_run_whose_trainer_is_the_bottleneck_gets_that_finding_first(areal):
    many = ["rollout.num_workers=4", "emulation.trainer_gpus=1", "emulation.train_mfu=0.02", "name=many"]
    first = diagnosed(areal("train", *EMULATED, "emulation.speedup=20", *many))[0]
    assert "the trainer is the bottleneck, and there are more rollout workers than it needs" in first.title
    assert "held back by the staleness bound (4)" in first.title
    assert "higher max_staleness would only make samples older" in first.advice


@pytest.mark.thorough
def test_run_with_a_stalled_reward_function_gets_that_finding_first(areal, quickstart, tmp_path):
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(REWARDS))
    reward = ["reward.scorers=[{kind: 'my_rewards:hangs'}]", "reward.timeout_s=0.5", "reward.retries=0"]
    sizes = ["groups_per_step=4", "num_steps=10", "data.eval.limit=16", "name=hangs"]
    first = diagnosed(areal("train", quickstart, *SMALL, *reward, *sizes))[0]
    assert first.title.startswith("Scoring slows down the run")
    assert "scorer my_rewards:hangs" in first.title
    assert "the cause is not a lack of rollout workers" in first.detail
    assert "timed out" in first.detail


@pytest.mark.thorough
def test_run_whose_policy_collapses_gets_that_finding_first(areal, quickstart):
    absurd = ["trainer.optimizer.lr=0.05", "trainer.optimizer.warmup_steps=0"]
    first = diagnosed(areal("train", quickstart, *SMALL, *absurd, "groups_per_step=24", "num_steps=14", "name=wild"))[0]
    assert first.title.startswith("The policy collapsed")
    assert first.severity == "bad"
    assert "lower trainer.optimizer.lr from 0.05" in first.advice.lower()
