"""Claims about when a worker that loads a version is late, is tried again, and what old reports change."""

from __future__ import annotations

import math

import pytest
from desk import Desk, has, only
from made_workers import made_worker

from controller.coordinator import version_rollout
from controller.coordinator.effects import Note, SendVersion
from controller.coordinator.events import WorkerVersionLoaded, WorkerVersionStaged
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Worker
from controller.coordinator.worker_version import VersionState


def state_with(*workers: Worker) -> RunState:
    state = RunState(CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=9))
    for worker in workers:
        state.workers[worker.name] = worker
    return state


def test_next_due_time_is_the_earliest_of_those_present() -> None:
    late = made_worker("late", is_present=True, load_due_s=30.0, retry_at_s=1.0)
    quarantined = made_worker("quarantined", is_present=True, quarantine="broken", retry_at_s=20.0)
    gone = made_worker("gone", load_due_s=5.0)
    assert version_rollout.next_due_s(state_with()) == math.inf
    assert version_rollout.next_due_s(state_with(gone)) == math.inf
    assert version_rollout.next_due_s(state_with(late, gone)) == 30.0
    assert version_rollout.next_due_s(state_with(late, quarantined, gone)) == 20.0


def loading() -> Desk:
    """Version 1 was announced at 0 s, with 10 s to load it."""
    desk = Desk(groups_per_step=1, max_staleness=0, load_deadline_s=10.0, load_retry_s=4.0, max_load_attempts=2)
    desk.start()
    desk.finish(0)
    desk.ask(1)
    assert only(desk.publish(1), SendVersion).version == 1
    return desk


def test_a_load_is_late_after_its_deadline_and_tried_again_after_the_retry_time() -> None:
    desk = loading()
    assert desk.tick(10.0) == []
    assert only(desk.tick(0.5), Note).text == "w0 cannot load version 1: it did not receive the version within 10 s"
    assert not has(desk.tick(3.9), SendVersion)
    assert only(desk.tick(0.1), SendVersion).version == 1
    assert only(desk.tick(10.5), Note).kind == "quarantined"
    assert not has(desk.tick(100.0), SendVersion), "two attempts"


@pytest.mark.parametrize(("version", "lineage"), [(2, "l0"), (1, "unknown")])
def test_a_version_that_was_not_announced_is_not_taken_as_loaded_or_staged(version: int, lineage: str) -> None:
    desk = loading()
    loaded = desk.do(WorkerVersionLoaded(worker="w0", version=version, lineage=lineage))
    assert only(loaded, Note).text == f"w0 unexpectedly loaded version {version} of lineage {lineage}"
    staged = desk.do(WorkerVersionStaged(worker="w0", version=version, lineage=lineage))
    assert only(staged, Note).text == f"w0 unexpectedly staged version {version} of lineage {lineage}"
    (worker,) = desk.coordinator._state.workers.values()
    assert (worker.weights.version, worker.weights.state) == (0, VersionState.LOADING)


def test_a_late_report_of_an_older_version_takes_nothing_back_and_keeps_the_deadline() -> None:
    desk = loading()
    before = desk.coordinator.progress
    desk.load("w0", 0)
    assert desk.coordinator.progress > before
    assert has(desk.tick(10.5), Note), "version 1 is still awaited"
    desk.load("w0", 1)
    desk.load("w0", 0)
    (worker,) = desk.coordinator._state.workers.values()
    assert worker.weights.version == 1


def test_a_failure_to_load_what_was_replaced_meanwhile_is_ignored() -> None:
    desk = loading()
    assert only(desk.fail("w0", 0), Note).text == "w0 could not load version 0, which has been superseded"
    assert only(desk.fail("w0", 1), Note).text == "w0 cannot load version 1: bad checksum"
