"""A step takes what carries a signal once enough groups were tried for it, and no invariant is broken by that."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from desk import Desk, has, leased, only, state_of
from example_counts import num_examples
from real_ledger import apply_all
from schedules import random_settings, run_schedule

from areal_like.errors import UserError
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import RecordGroup, RecordLineage, SendBatch
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchGroup, BatchRecord
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger

DYNAMIC: dict[str, Any] = {
    "group_size": 2, "groups_per_step": 3, "max_staleness": 0, "filter_zero_signal": True, "max_attempts": 4,
}  # fmt: skip


def finish(desk: Desk, group_id: int, *, has_signal: bool, version: int = 0) -> list[Any]:
    desk.finish(group_id, 0, value=1.0, first=version)
    return desk.finish(group_id, 1, value=0.0 if has_signal else 1.0, first=version)


def test_a_step_takes_fewer_groups_after_so_many_attempts() -> None:
    desk = Desk(**DYNAMIC)
    desk.start()
    desk.ask(1)
    for group_id in (0, 1):
        assert not has(finish(desk, group_id, has_signal=False), SendBatch)
    assert not has(finish(desk, 2, has_signal=True), SendBatch)
    assert not has(finish(desk, 3, has_signal=True), SendBatch), "a group that this step could take still runs"
    batch = only(finish(desk, 4, has_signal=False), SendBatch)
    assert [group.group_id for group in batch.groups] == [2, 3]


def test_places_that_stay_empty_count_as_started() -> None:
    desk = Desk(**{**DYNAMIC, "max_attempts": 3})
    desk.start()
    desk.ask(1)
    finish(desk, 0, has_signal=True)
    finish(desk, 1, has_signal=False)
    orders = leased(finish(desk, 2, has_signal=False))
    assert orders == [], "enough was tried: a group that starts now would be for the next step"
    (running,) = {order.group_id for _, order in desk.held.values()}
    batch = only(finish(desk, running, has_signal=False), SendBatch)
    assert [group.group_id for group in batch.groups] == [0]
    desk.publish(1)
    effects = desk.load("w0", 1)
    admitted = [effect for effect in effects if isinstance(effect, RecordGroup)]
    assert [effect.started for effect in admitted] == [4, 5, 6]


def test_without_the_section_a_step_waits_for_all_its_groups() -> None:
    desk = Desk(**{**DYNAMIC, "max_attempts": None})
    desk.start()
    desk.ask(1)
    for group_id in range(9):
        assert not has(finish(desk, group_id, has_signal=group_id == 0), SendBatch)


def test_it_waits_for_the_least_number_whatever_the_attempts() -> None:
    desk = Desk(**{**DYNAMIC, "min_groups": 2})
    desk.start()
    desk.ask(1)
    finish(desk, 0, has_signal=True)
    for group_id in range(1, 9):
        assert not has(finish(desk, group_id, has_signal=False), SendBatch)
    sent: list[Any] = []
    for group_id in (9, 10):
        sent += finish(desk, group_id, has_signal=group_id == 9)
    batch = only(sent, SendBatch)
    assert [group.group_id for group in batch.groups] == [0, 9]


def test_a_full_step_goes_at_once() -> None:
    desk = Desk(**{**DYNAMIC, "max_attempts": 100})
    desk.start()
    desk.ask(1)
    effects: list[Any] = []
    for group_id in range(3):
        effects += finish(desk, group_id, has_signal=True)
    assert len(only(effects, SendBatch).groups) == 3


def test_the_ledger_says_what_a_step_takes_at_least() -> None:
    for settings, least in ((DYNAMIC, 1), ({**DYNAMIC, "max_attempts": None}, None), ({**DYNAMIC, "min_groups": 2}, 2)):
        desk = Desk(**settings)
        assert only(desk.start(), RecordLineage).least_groups == least


def resumed(**settings: Any) -> Desk:
    """A run of two steps, of which the second took one group of two."""
    batches = tuple(
        BatchRecord(
            step=step,
            lineage="l0",
            groups=tuple(BatchGroup(group_id=one, sample_indices=(0,), first_version=step - 1) for one in ids),
        )
        for step, ids in ((1, (0, 1)), (2, (2,)))
    )
    chosen = CoordinatorSettings(**{"groups_per_step": 2, "group_size": 1, "num_steps": 9, **settings})
    return Desk(Coordinator.restore(chosen, state_of(batches=batches, num_drawn=3)))


def test_a_resumed_run_knows_the_empty_places() -> None:
    desk = resumed(max_staleness=0, filter_zero_signal=True, max_attempts=4)
    effects = desk.start(checkpoint=2)
    admitted = [effect.started for effect in effects if isinstance(effect, RecordGroup)]
    assert admitted == [5, 6]


def test_a_run_with_short_steps_is_not_resumed_as_one_of_full_steps() -> None:
    with pytest.raises(UserError, match="recorded with 1, but the config has 2"):
        resumed()


def dynamic_settings(seed: int) -> CoordinatorSettings:
    rng = random.Random(seed)
    settings = random_settings(rng)
    settings = msgspec.structs.replace(
        settings, filter_zero_signal=True, group_size=2, groups_per_step=rng.randint(2, 4)
    )
    return msgspec.structs.replace(
        settings,
        max_attempts=settings.groups_per_step + rng.randint(0, 3),
        min_groups=rng.randint(1, settings.groups_per_step),
    )


@pytest.mark.parametrize("seed", range(num_examples(60)))
def test_invariants_hold_in_random_schedules_with_short_steps(seed: int) -> None:
    cluster = run_schedule(seed, settings=dynamic_settings(seed))
    assert cluster.end is not None


def test_random_schedules_have_short_steps() -> None:
    vacant = sum(run_schedule(seed, settings=dynamic_settings(seed)).ledger.num_vacant for seed in range(20))
    assert vacant > 0


@pytest.mark.parametrize("seed", range(3))
def test_the_audit_recounts_short_steps(seed: int, tmp_path: Path) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        run_schedule(seed, settings=dynamic_settings(seed), mirror=lambda entries: apply_all(ledger, entries))
    report = audit(tmp_path)
    assert report.is_clean, report.lines()
