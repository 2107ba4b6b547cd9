"""A whole job whose workflow calls two models: only the declared role is trained, by tokens of its own versions, and
towards the log-probs of the other model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

CRITIC = str(Path(__file__).resolve().parents[2] / "configs" / "critic_sum.yaml")
MODELS = "[{name: generator, source: policy}, {name: critic, source: policy, refresh_every: 2}]"
SMALL = [
    "warm_start=null", "num_steps=5", "groups_per_step=4", "group_size=4", "rollout.engine.num_slots=8",
    "data.train.limit=64", "data.eval=null", "metrics.report=false", "metrics.display=plain", "rollout.progress_s=0.1",
]  # fmt: skip
TAUGHT = [
    "trainer.teacher.model=critic", "trainer.advantage.kind=distillation", "trainer.advantage.options={}",
]  # fmt: skip


def test_a_critic_that_copies_the_policy_every_two_versions_is_never_trained_and_may_be_the_teacher(areal):
    run = areal("train", CRITIC, *SMALL, f"rollout.models={MODELS}", *TAUGHT)
    assert run.wait() == 0, run.output
    assert (run.summary["audit"], run.summary["steps"]) == ("clean", 5)
    distances = [step["teacher_kl"] for step in run.metrics("step")]
    assert len(distances) == 5
    assert max(map(abs, distances)) < 0.5, "an earlier version of the policy, whose learning rate is small"
    shown = areal("samples", str(run.folder), "--format", "jsonl", "--out", "-", "--limit", "all")
    assert shown.wait() == 0, shown.output
    spans = [
        span
        for line in shown.output.splitlines()
        if line.startswith("{")
        for trajectory in json.loads(line)["trajectories"]
        for span in trajectory["spans"]
    ]
    critic = [span for span in spans if span["source"].startswith("critic ")]
    assert len(critic) >= 5 * 16
    assert all(span["versions"] == "" for span in critic)
    versions = {int(span["source"].split()[1]) for span in critic}
    # A worker that is late loads the version after a multiple of two instead, and the copy is made of that one.
    assert len({version // 2 for version in versions}) == len(versions), versions
    assert len(versions) > 1
    trained = [span for span in spans if span["versions"]]
    assert all(span["source"] == f"generator {span['versions']}" for span in trained)
