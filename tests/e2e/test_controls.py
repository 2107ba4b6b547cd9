"""What must not learn does not, and what must be strict is: control experiments and modes."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.e2e


def test_learning_rate_zero_leaves_the_policy_where_it_was(areal, quickstart, short):
    run = areal(
        "train", quickstart, *short, "trainer.optimizer.lr=0", "data.eval.limit=200", "rollout.interruption=keep_kv"
    )
    assert run.wait() == 0, run.output
    assert run.summary["accuracy_after"] == pytest.approx(run.summary["accuracy_before"], abs=0.02)
    assert run.summary["audit"] == "clean"


@pytest.mark.thorough
def test_random_rewards_teach_nothing(areal, quickstart, learning, tmp_path):
    """Twelve such steps of true rewards go from 0.30 and 0.26 to 0.81 and 0.90 (seeds 1 and 2, 2026-11-21)."""
    (tmp_path / "coin.py").write_text(
        "import random\n\ndef toss(row, response, **info):\n    return random.Random(response).choice([0.0, 1.0])\n"
    )
    run = areal(
        "train", quickstart, *learning, "num_steps=12", "trainer.optimizer.lr=2.0e-4", "data.eval.limit=300",
        "reward.scorers=[{kind: 'coin:toss'}, {kind: running_sum, weight: 0}]",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    assert run.summary["accuracy_after"] < run.summary["accuracy_before"] + 0.15


@pytest.mark.parametrize(
    ("mode", "bound", "interruption"),
    [
        pytest.param("sync", 0, "recompute", marks=pytest.mark.thorough),  # in every run: test_equalities.py
        ("one_step_off", 1, "drain"),
    ],
)
def test_mode_keeps_its_bound(areal, quickstart, short, mode, bound, interruption):
    run = areal("train", quickstart, *short, f"mode={mode}", f"rollout.interruption={interruption}")
    assert run.wait() == 0, run.output
    assert run.summary["steps"] == 6
    assert run.summary["audit"] == "clean"
    assert run.summary["staleness_max"] <= bound


def test_two_workers_partial_rollouts_several_updates_a_step_and_no_groups_without_a_signal(areal, quickstart, short):
    run = areal(
        "train", quickstart, *short, "rollout.num_workers=2", "rollout.segment_tokens=16", "trainer.mini_batches=3",
        "trainer.weights.kind=disk", "staleness.on_stale=drop", "staleness.max_staleness=1",
        "filter_zero_signal=true",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["staleness_max"] <= 1
    assert run.summary["samples_filtered"] > 0


def test_all_filtered_batches_end_the_run_with_advice(areal, quickstart, short, tmp_path):
    (tmp_path / "always.py").write_text("def one(row, response, **info):\n    return 1.0\n")
    run = areal(
        "train", quickstart, *short, "filter_zero_signal=true", "max_filtered_batches=2",
        "reward.scorers=[{kind: 'always:one'}]",
    )  # fmt: skip
    assert run.wait() != 0
    assert "Traceback" not in run.output
    assert "filter" in run.output
