"""Claims about the summary's numbers."""

from __future__ import annotations

import json

import pytest

from controller.coordinator.snapshot import BatchGroup, BatchRecord, Counts
from controller.telemetry.summary import Tally, fates, write_summary

PROMISED = {
    "accuracy_before", "accuracy_after", "wall_s", "steps", "samples_per_s", "tokens_per_s", "trainer_wait_share",
    "rollout_idle_share", "staleness_mean", "staleness_max", "samples_consumed", "samples_filtered", "samples_dropped",
}  # fmt: skip


def counts(**facts: object) -> Counts:
    given: dict[str, object] = {
        "drawn": 10, "consumed": 6, "filtered": 1, "dropped": {"stale": 2}, "running": 1, "ready": 0,
        "samples_finished": 0, **facts,
    }  # fmt: skip
    return Counts(**given)  # type: ignore[arg-type]


def batch(step: int, *kept: int) -> BatchRecord:
    groups = tuple(
        BatchGroup(group_id=10 * step + i, sample_indices=tuple(range(n)), first_version=0) for i, n in enumerate(kept)
    )
    return BatchRecord(step=step, lineage="l0", groups=groups)


def test_summary_carries_every_promised_key():
    found = fates(counts(), [batch(1, 4, 4)], group_size=4, version=1)
    summary = Tally().summary(found, status="completed", wall_s=1.0, prepare_s=0.0)
    assert summary.keys() >= PROMISED


def test_groups_and_samples_add_up_with_a_batch_that_was_sent_and_never_trained():
    found = fates(counts(), [batch(1, 4, 3), batch(2, 4, 4), batch(3, 4, 4)], group_size=4, version=2)
    assert found["groups_consumed"] == 4
    assert found["samples_consumed"] == 15
    assert found["groups_in_flight"] == 1 + 2
    assert found["samples_dropped"] == 2 * 4 + 1, "two groups dropped, and the sample that its group went without"
    assert found["samples_filtered"] == 4
    assert found["groups_drawn"] == sum(
        found[f"groups_{fate}"] for fate in ("consumed", "filtered", "dropped", "in_flight")
    )


def test_rates_and_shares_are_sums_over_processes_and_incarnations():
    tally = Tally(train_wall_s=10.0)
    tally.add_step(8, 100, [0, 1])
    tally.add_step(8, 300, [2, 1])
    tally.add_counters("trainer", "a", {"wait_s": 1.0, "busy_s": 3.0})
    tally.add_counters("rollout-0", "a", {"busy_s": 2.0, "idle_s": 1.0, "paused_s": 1.0, "tokens": 5.0})
    tally.add_counters("rollout-0", "a", {"busy_s": 4.0, "idle_s": 1.0, "paused_s": 1.0, "tokens": 9.0})
    tally.add_counters("rollout-0", "b", {"busy_s": 9.0, "idle_s": 1.0, "tokens": 2.0})
    tally.add_counters("rollout-1", "c", {"busy_s": 3.0, "idle_s": 1.0})
    summary = tally.summary({}, status="completed", wall_s=12.0, prepare_s=1.0)
    assert (summary["samples_per_s"], summary["tokens_per_s"]) == (1.6, 40.0)
    assert summary["trainer_wait_share"] == 0.25
    assert summary["rollout_idle_share"] == pytest.approx(3 / 20)
    assert summary["rollout_paused_share"] == pytest.approx(1 / 20)
    assert (summary["staleness_mean"], summary["staleness_max"]) == (1.0, 2)
    assert summary["staleness_histogram"] == {"0": 1, "1": 2, "2": 1}
    assert tally.total("rollout", "tokens") == 11.0
    assert tally.totals()["rollout-0"]["busy_s"] == 13.0


def test_gauge_that_falls_is_not_counted_twice():
    tally = Tally()
    for queue in (5.0, 0.0, 5.0, 0.0):
        tally.add_counters("reward", "a", {"queue": queue, "scored": 7.0})
    assert tally.total("reward", "scored") == 7.0


def test_run_without_steps_or_evaluation_has_no_numbers_instead_of_zeros():
    summary = Tally().summary({}, status="stopped", wall_s=1.0, prepare_s=0.0)
    for key in ("accuracy_before", "accuracy_after", "samples_per_s", "trainer_wait_share", "staleness_mean"):
        assert summary[key] is None
    assert summary["steps"] == 0


def test_accuracy_after_names_its_version_and_counts_scored_rows_only():
    tally = Tally()
    assert tally.add_evaluation(0, (1.0, 0.0, None, 0.0)) == 3
    assert tally.add_evaluation(8, (1.0, 1.0)) == 2
    assert tally.add_evaluation(9, (None, None)) == 0
    summary = tally.summary({}, status="completed", wall_s=1.0, prepare_s=0.0)
    assert summary["accuracy_before"] == pytest.approx(1 / 3)
    assert (summary["accuracy_after"], summary["accuracy_after_version"], summary["eval_prompts"]) == (1.0, 8, 2)


def test_steps_of_earlier_stretches_count_but_not_for_the_rates():
    tally = Tally(train_wall_s=2.0)
    tally.add_history([0, 3])
    tally.add_step(4, 40, [1, 0])
    summary = tally.summary({}, status="completed", wall_s=2.0, prepare_s=0.0)
    assert (summary["steps"], summary["staleness_max"], summary["samples_per_s"]) == (2, 3, 2.0)


def test_what_is_written_is_the_summary(tmp_path):
    summary = {"audit": "exactly-once: steps [/] have [bold]holes", "steps": 3, "accuracy_before": None, "share": 0.25}
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_answers_before_and_after_are_in_the_summary_once_there_are_both():
    tally = Tally()
    for version, answer in ((0, "wrong"), (3, "right")):
        assert "answers" not in tally.summary({}, status="completed", wall_s=1.0, prepare_s=0.0)
        tally.answers.record(version, 0, {"prompt": "1+1="}, answer, float(version > 0))
        tally.answers.finish(version)
    (found,) = tally.summary({}, status="completed", wall_s=1.0, prepare_s=0.0)["answers"]
    assert found == {
        "prompt": "1+1=", "before": "wrong", "value_before": 0.0, "after": "right", "value_after": 1.0,
    }  # fmt: skip
