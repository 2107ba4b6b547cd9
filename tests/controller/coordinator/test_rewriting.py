"""Claims about versions whose files are damaged: the trainer writes them again, a bounded number of times."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from desk import Desk, has, only
from example_counts import num_examples
from schedules import FAULTLESS
from virtual_cluster import VirtualCluster

from controller.coordinator import rewriting
from controller.coordinator.effects import Effect, EndRun, EvalDropped, Note, SendLeases, SendRewrite, SendVersion
from controller.coordinator.events import CheckpointTaken, RunStarted, TrainerRestarted, VersionRewritten
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchRecord


def desk(*, workers: tuple[str, ...] = ("w0",), version: int = 1, **settings) -> Desk:
    """Workers that have version 0, and were notified of `version`."""
    made = Desk(load_deadline_s=60.0, **settings)
    made.start(workers=workers)
    if version:
        made.ask(1)
        made.finish(0)
        made.finish(1)
        made.publish(1)
    return made


def first_version(**settings) -> Desk:
    """A worker that was notified of version 0."""
    made = Desk(**settings)
    made.lineage = "l0"
    made.do(RunStarted(lineage="l0", checkpoint_version=0))
    made.join("w0")
    made.publish(0)
    return made


def sent(effects: list[Effect]) -> dict[str, str]:
    """Manifest by worker that a version was announced to."""
    return {effect.worker: effect.manifest_path for effect in effects if isinstance(effect, SendVersion)}


def test_reported_damage_makes_the_trainer_write_the_version_again_and_workers_load_it_at_once():
    run = desk(workers=("w0", "w1"))
    assert only(run.damaged("w0", 1), SendRewrite) == SendRewrite(version=1, lineage="l0")
    assert not has(run.damaged("w1", 1), SendRewrite), "it is under way"
    assert not has(run.tick(30.0), SendVersion), "the damaged files are not announced again"
    assert any("write version 1 again" in line for line in run.coordinator.waits())
    assert sent(run.rewritten(1)) == {"w0": "again1", "w1": "again1"}
    assert has(run.load("w0", 1), SendLeases)


def test_first_version_is_written_again_too():
    run = first_version()
    assert only(run.damaged("w0", 0), SendRewrite).version == 0
    assert sent(run.rewritten(0)) == {"w0": "again0"}
    assert has(run.load("w0", 0), SendLeases)


def test_last_version_is_written_again_for_the_final_evaluation():
    run = desk(num_steps=1, num_eval_rows=1, eval_at_start=False, eval_at_end=True)
    run.do(CheckpointTaken(version=1, path="c1"))
    assert only(run.damaged("w0", 1), SendRewrite).version == 1
    assert not has(run.tick(1.0), EvalDropped)
    assert sent(run.rewritten(1)) == {"w0": "again1"}
    run.load("w0", 1)
    assert only(run.finish(0, purpose="eval", first=1), EndRun).status == "completed"


def test_report_that_crosses_a_rewrite_is_answered_by_the_new_files():
    run = desk(workers=("w0", "w1"))
    run.damaged("w0", 1)
    run.rewritten(1)
    late = run.damaged("w1", 1)
    assert not has(late, SendRewrite)
    assert sent(late) == {"w1": "again1"}


def test_rewrites_are_bounded_and_then_the_run_ends_with_the_reason():
    run = first_version()
    run.ask(1)
    for _ in range(rewriting.MAX_REWRITES):
        assert has(run.damaged("w0", 0), SendRewrite)
        run.rewritten(0)
    assert not has(run.damaged("w0", 0), SendRewrite)
    while not has(run.effects, EndRun):
        run.tick(10.0)
        run.damaged("w0", 0)
        assert run.now_s < 600
    end = only(run.effects, EndRun)
    assert end.status == "failed"
    assert "no rollout worker is left for batch 1" in end.reason
    assert "bad checksum" in end.reason


def test_worker_that_is_loading_is_neither_reported_again_nor_given_up():
    run = first_version(load_retry_s=1.0, max_load_attempts=2, load_deadline_s=60.0)
    run.ask(1)
    run.fail("w0", 0)
    assert sent(run.tick(2.0)) == {"w0": "v0"}, "the second and last attempt"
    quiet = [*run.tick(10.0), *run.tick(10.0)]
    assert not has(quiet, SendVersion)
    assert not has(quiet, EndRun)
    assert has(run.load("w0", 0), SendLeases)


@pytest.mark.parametrize("answer", ["refused", "none"])
def test_trainer_that_cannot_write_it_again_is_not_waited_for_without_end(answer):
    run = desk()
    run.damaged("w0", 1)
    if answer == "refused":
        run.rewritten(1, reason="no room")
    else:
        assert not has(run.tick(100.0), SendVersion)
    assert sent(run.tick(30.0)) == {"w0": "v1"}, "the ordinary retry"


def test_rewrite_is_not_given_the_time_in_which_workers_drain():
    run = first_version(load_deadline_s=1860.0, drain_s=1800.0)
    run.damaged("w0", 0)
    assert not has(run.tick(119.0), SendVersion)
    assert sent(run.tick(2.0)) == {"w0": "v0"}, "the ordinary retry, after twice the 60 s of a load"


def test_newer_version_takes_the_place_of_a_rewrite():
    run = desk()
    run.damaged("w0", 1)
    run.ask(2)
    run.do(VersionRewritten(version=1, lineage="l0", manifest_path="", reason="a newer version has replaced it"))
    assert not has(run.rewritten(1), SendVersion), "nobody waits for it"


def test_late_answer_still_tells_where_the_new_files_are():
    """With deltas the rewrite deletes the file that was announced."""
    run = desk()
    run.damaged("w0", 1)
    assert sent(run.tick(130.0)) == {"w0": "v1"}, "the rewrite has expired"
    run.fail("w0", 1)
    assert sent(run.rewritten(1)) == {"w0": "again1"}
    assert has(run.load("w0", 1), SendLeases)


def test_failure_report_of_an_earlier_lineage_does_not_count_for_the_version_announced_since():
    run = desk()
    batches = (BatchRecord(step=1, lineage="l0", groups=()),)
    run.do(TrainerRestarted(reason="killed", lineage="l1", checkpoint_version=0, batches=batches))
    run.lineage = "l1"
    run.publish(0)
    run.ask(1)
    assert sent(run.publish(1)) == {"w0": "v1"}
    run.lineage = "l0"
    assert not has(run.damaged("w0", 1), SendRewrite)
    run.lineage = "l1"
    assert has(run.load("w0", 1), SendLeases)


def test_damage_of_a_version_or_lineage_that_was_announced_before_is_not_written_again():
    run = desk()
    weights = run.coordinator._state.workers["w0"].weights
    for stale in ({"announced": 0}, {"announced_lineage": "l1"}):
        worker = SimpleNamespace(name="w0", weights=replace(weights, **stale))
        assert not rewriting.damage_reported(run.coordinator._state, worker)
    assert rewriting.damage_reported(run.coordinator._state, run.coordinator._state.workers["w0"])


def test_failure_that_is_no_damage_is_not_written_again():
    run = desk()
    assert not has(run.fail("w0", 1), SendRewrite)


def test_without_a_trainer_there_is_nobody_to_ask():
    run = first_version(num_steps=0, num_eval_rows=1)
    assert not has(run.damaged("w0", 0), SendRewrite)


def test_trainer_that_dies_meanwhile_owes_no_rewrite_and_its_successor_brings_the_version():
    run = desk()
    run.damaged("w0", 1)
    batches = (BatchRecord(step=1, lineage="l0", groups=()),)
    run.do(TrainerRestarted(reason="killed", lineage="l1", checkpoint_version=0, batches=batches))
    assert not has(run.rewritten(1), SendVersion), "of the dead trainer"
    run.lineage = "l1"
    run.publish(0)
    run.ask(1)
    assert sent(run.publish(1)) == {"w0": "v1"}


@pytest.mark.parametrize("mode", ["async", "sync", "colocated"])
def test_runs_complete_in_spite_of_damaged_versions_under_random_schedules(mode):
    """The first, the last and any other version; nothing else goes wrong."""
    num_rewrites = 0
    for seed in range(num_examples(150)):
        rng = random.Random(seed)
        settings = CoordinatorSettings(
            groups_per_step=2, group_size=2, num_steps=3, num_workers=2, num_eval_rows=rng.choice([0, 2]),
            mode="sync" if mode == "sync" else "async", is_colocated=mode == "colocated", max_staleness=1,
            max_filtered_batches=0, load_retry_s=2.0, max_load_attempts=2, swap=rng.choice(["together", "rolling"]),
        )  # fmt: skip
        cluster = VirtualCluster(settings, rng, failure_rate=0.0, equal_rate=0.0)
        cluster.damage_version()
        actions = [*(name for name in FAULTLESS if name != "leave"), "damage_version"]
        for action in rng.choices(actions, k=150):
            if cluster.end is None:
                getattr(cluster, action)()
        end = cluster.end or cluster.run_to_end()
        assert end.status == "completed", f"seed {seed}: {end.reason}"
        assert not any(isinstance(one, EvalDropped) and one.kind != "periodic" for one in cluster.evals)
        cluster.check_end()
        num_rewrites += cluster.num_rewrites
    assert num_rewrites > num_examples(150)


def notes(effects: list[Effect], kind: str) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == kind]


def test_a_rewrite_and_its_failure_are_said():
    run = desk()
    assert notes(run.damaged("w0", 1), "rewrite") == [
        f"w0 found version 1 damaged; the trainer writes it again (attempt 1 of {rewriting.MAX_REWRITES})"
    ]
    assert notes(run.rewritten(1, "disk full"), "rewrite_failed") == ["version 1 is not written again: disk full"]
