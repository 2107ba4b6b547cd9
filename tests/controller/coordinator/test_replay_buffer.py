"""Groups of earlier steps are trained on again within their age, under faults and resumes as well."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from desk import Desk, only
from example_counts import num_examples
from real_cluster import RealCluster
from real_ledger import apply_all
from schedules import random_settings, run_schedule

from controller.coordinator.effects import PurgePayloads, RecordBatch, RecordLineage, SendBatch
from controller.coordinator.events import CheckpointTaken
from controller.coordinator.replay_buffer import ReplayBuffer, ReplayLimits
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.ledger.schema import encode_groups


def group(group_id: int, version: int) -> BatchGroup:
    return BatchGroup(group_id=group_id, sample_indices=(0,), first_version=version)


def ids(groups: tuple[BatchGroup, ...]) -> list[int]:
    return [one.group_id for one in groups]


def filled(**limits: int) -> ReplayBuffer:
    """Steps 1 to 3 took groups 0 to 5, two each, sampled by the version before."""
    buffer = ReplayBuffer(ReplayLimits(**{"groups_per_step": 3, "max_age": 2, "max_reuses": 1, **limits}))
    for step in (1, 2, 3):
        buffer.record(step, (group(2 * step - 2, step - 1), group(2 * step - 1, step - 1)), ())
    return buffer


def test_the_newest_groups_come_first_and_a_reused_one_comes_last() -> None:
    buffer = filled(max_reuses=2, max_age=4)
    assert ids(buffer.choose(4)) == [3, 4, 5]
    buffer.record(4, (), (group(4, 2), group(5, 2)))
    assert ids(buffer.choose(5)) == [1, 2, 3], "those reused least, then the newest"


def test_a_group_is_reused_up_to_its_age_and_so_often() -> None:
    assert ids(filled().choose(4)) == [3, 4, 5]
    assert ids(filled(groups_per_step=9).choose(4)) == [2, 3, 4, 5], "groups 0 and 1 are three versions old"
    assert ids(filled().choose(5)) == [4, 5]
    assert ids(filled().choose(6)) == []
    buffer = filled(groups_per_step=9)
    buffer.record(4, (), (group(4, 2),))
    assert ids(buffer.choose(5)) == [5]


def test_groups_without_tokens_leave_the_buffer() -> None:
    buffer = filled(groups_per_step=9)
    buffer.keep_only({0, 1, 4})
    assert ids(buffer.choose(4)) == [4]


def test_without_limits_nothing_is_kept() -> None:
    buffer = ReplayBuffer(None)
    buffer.record(1, (group(0, 0),), ())
    assert buffer.choose(2) == ()


SETTINGS: dict[str, Any] = {
    "groups_per_step": 1, "group_size": 1, "num_steps": 9, "max_staleness": 2, "keep_checkpoints": 1,
    "replay": ReplayLimits(groups_per_step=1, max_age=2, max_reuses=1),
}  # fmt: skip


def step_of(desk: Desk, step: int) -> list[Any]:
    """The effects of the step's batch, of group step - 1, sampled by the version before."""
    desk.load("w0", step - 1)
    desk.ask(step)
    effects: list[Any] = desk.finish(step - 1, 0, value=1.0, first=step - 1)
    return effects


def test_a_step_records_and_sends_its_own_groups_and_reused_ones() -> None:
    desk = Desk(**SETTINGS)
    lineage = only(desk.start(), RecordLineage)
    assert (lineage.replay_groups, lineage.replay_max_age, lineage.replay_max_reuses) == (1, 2, 1)
    assert only(step_of(desk, 1), SendBatch).reused == ()
    desk.publish(1)
    effects = step_of(desk, 2)
    record, batch = only(effects, RecordBatch), only(effects, SendBatch)
    assert (ids(record.groups), ids(record.reused)) == (ids(batch.groups), ids(batch.reused)) == ([1], [0])
    assert desk.coordinator.counts().consumed == 2, "a reused group is counted once"


def test_tokens_that_a_step_after_the_checkpoint_may_reuse_are_kept() -> None:
    desk = Desk(**SETTINGS)
    desk.start()
    for step in (1, 2, 3):
        step_of(desk, step)
        desk.publish(step)
    purge = only(desk.do(CheckpointTaken(version=3, path="c")), PurgePayloads)
    assert purge.covered_step == 1


def test_a_reused_group_must_be_within_the_bound() -> None:
    with pytest.raises(ValueError, match="must not exceed the staleness bound"):
        CoordinatorSettings(**{**SETTINGS, "max_staleness": 1})
    CoordinatorSettings(**{**SETTINGS, "max_staleness": 1, "on_stale": "keep"})
    CoordinatorSettings(**{**SETTINGS, "max_staleness": None})


def replay_settings(seed: int) -> CoordinatorSettings:
    rng = random.Random(seed)
    settings = random_settings(rng)
    bound = rng.choice([1, 2, 4, None])
    limits = ReplayLimits(
        groups_per_step=rng.randint(1, 4), max_age=rng.randint(1, bound or 5), max_reuses=rng.randint(1, 3)
    )
    return msgspec.structs.replace(
        settings, mode="async", max_staleness=bound, num_steps=rng.randint(3, 8), replay=limits
    )


@pytest.mark.parametrize("seed", range(num_examples(80)))
def test_invariants_hold_in_random_schedules_with_reuse(seed: int) -> None:
    cluster = run_schedule(seed, settings=replay_settings(seed))
    assert cluster.end is not None


def test_random_schedules_reuse_groups_in_replayed_steps_as_well() -> None:
    clusters = [run_schedule(seed, settings=replay_settings(seed)) for seed in range(20)]
    assert sum(sum(cluster.ledger.num_reuses.values()) for cluster in clusters) > 50
    assert any(len(cluster.ledger.lineages) > 1 for cluster in clusters)


@pytest.mark.parametrize("seed", range(num_examples(12)))
def test_the_real_ledger_holds_what_is_reused_and_its_audit_is_clean(seed: int, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(replay_settings(seed), keep_checkpoints=1)
    cluster = run_schedule(
        seed, settings=settings, make=lambda *args, **options: RealCluster(*args, folder=tmp_path, **options)
    )
    assert isinstance(cluster, RealCluster)
    cluster.real.close()
    report = audit(tmp_path)
    assert report.is_clean, report.lines()
    samples = {chosen.group_id: len(chosen.sample_indices) for batch in cluster.ledger.batches.values()
               for chosen in batch.groups}  # fmt: skip
    assert report.num_reused == sum(
        samples[group_id] * number for group_id, number in cluster.ledger.num_reuses.items()
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The ledger of a run of six steps, each of which reuses one group of the step before."""
    settings = CoordinatorSettings(
        **{**SETTINGS, "num_steps": 6, "max_staleness": None, "keep_checkpoints": 9, "num_workers": 1}
    )
    with Ledger(tmp_path, run_id="r", keep_bytes=None) as ledger:
        run_schedule(4, settings=settings, num_actions=0, mirror=lambda entries: apply_all(ledger, entries))
    assert "later steps trained on samples again" in audit(tmp_path).lines()[0]
    return tmp_path


def forged(folder: Path, statement: str, *values: Any) -> str:
    """The findings after a change of the record."""
    with sqlite3.connect(folder / LEDGER_FILE) as db:
        db.execute(statement, values)
    return "\n".join(audit(folder).findings)


def reused_by(folder: Path, step: int, *groups: BatchGroup) -> str:
    return forged(folder, "UPDATE batches SET reused = ? WHERE step = ?", encode_groups(groups), step)


def test_the_audit_finds_a_group_reused_too_often_or_twice_in_a_step(recorded: Path) -> None:
    assert "reused group 1, which is reuse 2 of this group, but at most 1 are allowed" in reused_by(
        recorded, 4, group(1, 1)
    )
    assert "step 4 reused 2 groups, but at most 1 are allowed" in reused_by(recorded, 4, group(1, 1), group(1, 1))


def test_the_audit_finds_a_reused_group_past_its_age(recorded: Path) -> None:
    assert "replay_buffer.max_age is 2" in reused_by(recorded, 6, group(0, 0))


def test_the_audit_finds_a_reused_group_of_no_earlier_step(recorded: Path) -> None:
    assert "step 3 reused group 2 of no earlier step" in reused_by(recorded, 3, group(2, 2))


def test_the_audit_finds_reuse_without_a_buffer(recorded: Path) -> None:
    assert "reused 1 groups, but at most 0 are allowed" in forged(recorded, "UPDATE lineages SET replay_groups = NULL")
