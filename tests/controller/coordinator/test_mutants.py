"""Seeded mutants of the coordinator: the checks of the virtual cluster must catch every one of them.

A check that no broken coordinator fails proves nothing; here each invariant is broken on purpose, one small function
each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from example_counts import num_examples
from schedules import FAULTLESS, run_schedule
from virtual_cluster import VirtualCluster

from areal_like import staleness
from controller.coordinator import batch_shipping, migration, sample_intake
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import Effect, SendAck
from controller.coordinator.events import LeaseReturned, PartialReport, TrainerRestarted
from controller.coordinator.groups import Group, GroupTable
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchRecord, GroupRecord, LedgerState
from controller.coordinator.worker import Lease, Worker

MAX_SEEDS = 500


def settings(**changes: Any) -> CoordinatorSettings:
    chosen: dict[str, Any] = {
        "groups_per_step": 2, "group_size": 2, "num_steps": 8, "max_staleness": 3, "on_stale": "wait",
        "num_workers": 2, "max_sample_losses": 50, "max_filtered_batches": 0,
    }  # fmt: skip
    return CoordinatorSettings(**{**chosen, **changes})


def caught(make: Callable[..., VirtualCluster] = VirtualCluster, *, first: int = 0, **changes: Any) -> str:
    """The first complaint of the checks over many schedules; empty where none complains.

    first: seed that is tried before all, which is known to catch a mutant that few schedules do.
    """
    for seed in (first, *range(MAX_SEEDS)):
        try:
            run_schedule(seed, settings=settings(**changes), num_actions=300, make=make)
        except (AssertionError, KeyError) as error:
            return str(error) or "assertion inside the coordinator"
    return ""


def test_the_unchanged_coordinator_passes_what_the_mutants_fail() -> None:
    for bound in (0, 3):
        for seed in range(num_examples(40)):
            run_schedule(seed, settings=settings(max_staleness=bound), num_actions=300)


def test_admission_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_admit(started: int, version: int, groups_per_step: int, bound: int | None) -> bool:
        return bound is None or (started - 2) // groups_per_step <= version + bound

    monkeypatch.setattr(staleness, "may_admit", may_admit)
    assert "bounded-admission" in caught()
    assert "bounded-admission" in caught(max_staleness=0)


def test_admission_with_the_newest_instead_of_the_loaded_version_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def usable(worker: Worker) -> bool:
        return worker.is_present and not worker.weights.quarantine and worker.weights.announced >= 0

    def version_of(table: GroupTable, group_id: int, version: int) -> Group:
        return add(table, group_id, version + 1)

    add = GroupTable.add
    monkeypatch.setattr(GroupTable, "add", version_of)
    monkeypatch.setattr(Worker, "is_usable", property(usable))
    assert caught()


def test_looking_only_one_step_ahead_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = staleness.may_ship

    def may_ship(step: int, left_by_deadline: Mapping[int, int], groups_per_step: int) -> bool:
        near = {limit: number for limit, number in left_by_deadline.items() if limit <= step + 1}
        return honest(step, near, groups_per_step)

    monkeypatch.setattr(staleness, "may_ship", may_ship)
    assert "invariant I" in caught(first=228, groups_per_step=1, max_staleness=5)


def test_shipping_without_waiting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "may_ship", lambda *_: True)
    assert caught()


def test_a_lost_acknowledgement_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunState.emit

    def emit(state: RunState, effect: Effect) -> None:
        if not (isinstance(effect, SendAck) and effect.lease_ids[0] % 5 == 0):
            honest(state, effect)

    monkeypatch.setattr(RunState, "emit", emit)
    complaint = caught()
    assert "acknowledged" in complaint or "credits" in complaint


def test_an_acknowledgement_before_the_ledger_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_effects(state: RunState) -> list[Effect]:
        effects, state._effects = state._effects, []
        return sorted(effects, key=lambda effect: effect.is_ledger)

    monkeypatch.setattr(RunState, "take_effects", take_effects)
    assert "ledger effects come first" in caught()


def test_a_double_ship_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = batch_shipping._ship
    last: list[Group] = []

    def ship(state: RunState, step: int, chosen: list[Group]) -> None:
        if step % 3 == 0 and last:
            again = state.groups.table.add(last[0].group_id, last[0].version)
            again.samples = last[0].samples
            chosen = sorted([again, *chosen[1:]], key=lambda group: group.group_id)
        last[:] = chosen
        honest(state, step, chosen)

    monkeypatch.setattr(batch_shipping, "_ship", ship)
    complaint = caught()
    assert "already" in complaint or "running" in complaint, complaint


def test_a_duplicate_answer_taken_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunState.cancel
    monkeypatch.setattr(RunState, "cancel", lambda state, leases: honest(state, []))
    assert caught()


def test_another_order_than_earliest_deadline_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `wait` older groups then miss their deadlines."""

    def newest_first(ready: Mapping[int, set[int]], count: int) -> list[int]:
        return sorted((group_id for ids in ready.values() for group_id in ids), reverse=True)[:count]

    monkeypatch.setattr(staleness, "earliest_first", newest_first)
    assert "wait must lose nothing" in caught(groups_per_step=1)


def test_a_resume_that_forgets_recorded_batches_is_caught() -> None:
    class Forgetful(VirtualCluster):
        def restored(self, state: LedgerState) -> Coordinator:
            saved = max((checkpoint.version for checkpoint in state.checkpoints), default=0)
            kept = tuple(batch for batch in state.batches if batch.step <= saved)
            fields = {name: getattr(state, name) for name in LedgerState.__struct_fields__}
            return super().restored(LedgerState(**{**fields, "batches": kept}))

    assert caught(Forgetful)


def trainer_deaths(num_seeds: int = 200, **changes: Any) -> str:
    """Schedules in which the trainer dies often; the first complaint, empty where there is none."""
    names = [*FAULTLESS, "kill_trainer"]
    chosen = settings(**{"num_steps": 12, **changes})
    for seed in range(num_seeds):
        rng = random.Random(seed)
        cluster = VirtualCluster(chosen, rng, checkpoint_every=3, failure_rate=0.0)
        try:
            for name in rng.choices(names, [1.0] * len(FAULTLESS) + [0.3], k=300):
                if cluster.end is None:
                    getattr(cluster, name)()
            cluster.run_to_end()
            cluster.check_end()
        except (AssertionError, KeyError) as error:
            return str(error) or "assertion inside the coordinator"
    return ""


def test_a_trainer_that_dies_again_and_again_trains_on_every_batch_once() -> None:
    """In several times the schedules that catch the mutants below: each is caught by one of the first five."""
    assert trainer_deaths(num_examples(60)) == ""
    assert trainer_deaths(num_examples(60), max_staleness=0) == ""


def test_a_replay_that_gives_a_batch_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = batch_shipping._send_recorded

    def send_recorded(state: RunState, step: int) -> None:
        recorded = state.trainer.recorded
        if step - 1 not in recorded and step + 1 in recorded and step % 2:
            recorded[step + 1] = msgspec.structs.replace(recorded[step], step=step + 1)
        honest(state, step)

    monkeypatch.setattr(batch_shipping, "_send_recorded", send_recorded)
    assert "exactly-once" in trainer_deaths()


def test_a_replay_that_skips_a_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Coordinator._restart_trainer

    def restart(coordinator: Coordinator, event: TrainerRestarted) -> None:
        batches = list(event.batches)
        if len(batches) > 1:
            batches[0] = BatchRecord(step=batches[0].step, lineage=batches[0].lineage, groups=batches[1].groups)
        fields = {name: getattr(event, name) for name in TrainerRestarted.__struct_fields__}
        honest(coordinator, TrainerRestarted(**{**fields, "batches": tuple(batches)}))

    monkeypatch.setattr(Coordinator, "_restart_trainer", restart)
    assert "exactly-once" in trainer_deaths()


def test_a_replay_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer goes back to a checkpoint, and is given new batches from where it died."""
    honest = Coordinator._restart_trainer

    def restart(coordinator: Coordinator, event: TrainerRestarted) -> None:
        honest(coordinator, event)
        coordinator._state.trainer.recorded.clear()

    monkeypatch.setattr(Coordinator, "_restart_trainer", restart)
    assert "deadlock" in trainer_deaths()


def test_a_restart_that_keeps_its_lineage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Coordinator._begin_lineage

    def begin(coordinator: Coordinator, lineage: str, base: int, *, trainer_died: str = "") -> None:
        honest(coordinator, coordinator._state.trainer.lineage or lineage, base, trainer_died=trainer_died)

    monkeypatch.setattr(Coordinator, "_begin_lineage", begin)
    assert "lineage" in trainer_deaths()


def test_a_resume_that_forgets_partial_tokens_is_caught() -> None:
    class Forgetful(VirtualCluster):
        def restored(self, state: LedgerState) -> Coordinator:
            live = tuple(
                GroupRecord(
                    group_id=group.group_id,
                    version=group.version,
                    samples=tuple(sample for sample in group.samples if sample.is_finished),
                )
                for group in state.live
            )
            fields = {name: getattr(state, name) for name in LedgerState.__struct_fields__}
            return super().restored(LedgerState(**{**fields, "live": live}))

    assert caught(Forgetful)


def test_a_floor_that_ignores_samples_without_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GroupTable.refresh

    def refresh(table: GroupTable, group: Group) -> None:
        version, group.version = group.version, group.ceiling if group.ceiling is not None else group.version
        honest(table, group)
        group.version = version

    monkeypatch.setattr(GroupTable, "refresh", refresh)
    assert caught(first=89, group_size=3)


def late_schedules(num_seeds: int = 300) -> str:
    """Workers that fall silent for long and come back with old answers; the first complaint."""
    names = [*FAULTLESS, "silence"]
    rare = {"come_back": 0.1, "report_progress": 2.0, "silence": 0.5, "write_again": 0.0}
    weights = [rare.get(name, 1.0) for name in names]
    chosen = settings(groups_per_step=1, group_size=1, max_staleness=2)
    for seed in range(num_seeds):
        rng = random.Random(seed)
        cluster = VirtualCluster(chosen, rng, num_workers=3, capacity=3, failure_rate=0.0)
        try:
            for name in rng.choices(names, weights, k=300):
                if cluster.end is None:
                    getattr(cluster, name)()
            cluster.run_to_end()
            cluster.check_end()
        except AssertionError as error:
            return str(error)
    return ""


def test_a_late_answer_that_brings_a_deadline_forward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """First come first kept is not enough: an answer from before the group's floor makes `wait` lose groups."""
    assert late_schedules(num_examples(300)) == ""
    honest = sample_intake._refusal

    def lenient(*facts: Any) -> str:
        refusal = honest(*facts)
        return "" if "floor" in refusal else refusal

    monkeypatch.setattr(sample_intake, "_refusal", lenient)
    assert late_schedules()


def test_a_prefix_that_is_sampled_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(state: RunState, group: Group, sample: Any, **more: Any) -> None:
        sample.num_tokens, sample.first_version, sample.last_version = 0, -1, -1
        state.groups.table.push_pending(group, sample)

    monkeypatch.setattr(sample_intake, "requeue", forgetful)
    monkeypatch.setattr("controller.coordinator.worker_lifecycle.requeue", forgetful)
    assert caught()


MOVING = {"group_size": 1, "min_gain_s": 0.05, "max_new_tokens": 8}
"""Schedules in which answers migrate often."""


def test_schedules_migrate_and_drain_without_a_complaint() -> None:
    clusters = [run_schedule(seed, settings=settings(**MOVING), num_actions=300) for seed in range(90)]
    assert sum(cluster.num_migrated for cluster in clusters) > 40


def test_a_migrated_sample_kept_on_both_workers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leased again at once, instead of when its worker has let go of it."""
    honest = migration._recall

    def hasty(state: RunState, lease: Lease, target: Worker) -> None:
        honest(state, lease, target)
        group = state.groups.table.live[lease.group_id]
        sample = group.samples[lease.sample_index]
        sample.lease_id = None
        state.groups.table.push_pending(group, sample)

    monkeypatch.setattr(migration, "_recall", hasty)
    assert "two workers" in caught(**MOVING)


def test_tokens_lost_at_a_migration_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sample_intake.take_returned

    def forgetful(state: RunState, event: LeaseReturned) -> None:
        if event.reason == "migrated":
            part = PartialReport(lease_id=event.part.lease_id, start=event.part.start, num_tokens=0)
            event = LeaseReturned(worker=event.worker, part=part, reason=event.reason)
        honest(state, event)

    monkeypatch.setattr(sample_intake, "take_returned", forgetful)
    assert "tokens of a returned lease were lost" in caught(first=141, **MOVING)


def test_a_migration_that_forgets_the_prefix_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sample_intake.requeue

    def forgetful(state: RunState, group: Group, sample: Any, **more: Any) -> None:
        if sample.moved_from:
            sample.num_tokens, sample.first_version, sample.last_version = 0, -1, -1
        honest(state, group, sample, **more)

    monkeypatch.setattr(sample_intake, "requeue", forgetful)
    complaint = caught(**MOVING)
    assert "tokens" in complaint or "inside the coordinator" in complaint


def test_a_migration_to_an_older_version_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stamped-versions`: along an answer versions never decrease, whichever worker continues it."""
    honest = Group.min_version

    def any_version(group: Group, sample: Any) -> int:
        return group.version if sample.moved_from else honest(group, sample)

    monkeypatch.setattr(Group, "min_version", any_version)
    assert caught(**MOVING)


def test_a_draining_worker_that_is_leased_to_indefinitely_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusals come back and go out again."""
    monkeypatch.setattr("controller.coordinator.worker_lifecycle.drain", lambda *_: None)
    assert "leaves" in caught(**MOVING)
