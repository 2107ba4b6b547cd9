"""Seeded mutants of the life of a version: the random schedules must catch every guard and every call that is gone."""

from __future__ import annotations

import sys

import pytest
from colocated_schedules import run_colocated
from example_counts import num_examples
from roster_oracle import kept, looked_up
from version_schedules import run_versions

from controller.coordinator import version_rollout
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import SendSwap
from controller.coordinator.run_state import RunState
from controller.coordinator.worker import Worker, Workers
from controller.coordinator.worker_version import TABLE, VersionAction, VersionEvent, VersionState, WorkerVersion

MAX_SEEDS = 300


def caught(first: int = 0) -> str:
    """The first complaint over many schedules; empty where none complains.

    first: seed that is tried before all, which is known to catch a mutant that few schedules do.
    """
    for seed in (first, *range(MAX_SEEDS)):
        try:
            run_versions(seed)
        except (AssertionError, KeyError) as error:
            return str(error) or "assertion inside the coordinator"
    return ""


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_the_unchanged_coordinator_passes_what_the_mutants_fail(first: int) -> None:
    for seed in range(first, first + num_examples(40)):
        run_versions(seed)


def test_the_schedules_go_through_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: set[VersionState] = set()
    real = WorkerVersion._happen

    def happen(weights: WorkerVersion, event: VersionEvent, **facts: object) -> None:
        real(weights, event, **facts)  # type: ignore[arg-type]
        entered.add(weights.state)

    monkeypatch.setattr(WorkerVersion, "_happen", happen)
    for seed in range(MAX_SEEDS):
        run_versions(seed)
        if entered == set(VersionState):
            return
    raise AssertionError(f"never entered: {set(VersionState) - entered}")


# ---------------------------------------------------------------- guards around the table


def test_two_turns_at_once_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def grant_to_all(state: RunState) -> None:
        for worker in state.workers.values():
            if worker.is_present and worker.weights.is_staged:
                weights = worker.weights
                weights.grant_turn(state.now_s + 1e6)
                lineage = weights.announced_lineage
                state.emit(SendSwap(worker=worker.name, version=weights.announced, lineage=lineage))

    monkeypatch.setattr(version_rollout, "grant_turn", grant_to_all)
    assert "gets the turn while" in caught()


def test_a_turn_that_is_never_granted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_rollout, "grant_turn", lambda state: None)
    assert "deadlock" in caught()


def test_a_deadline_that_never_passes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lost what was announced to it waits indefinitely where nothing else has it announced again."""
    monkeypatch.setattr(version_rollout, "expire_loads", lambda state: None)
    monkeypatch.setattr(WorkerVersion, "reconnect", lambda weights: None)
    assert "deadlock" in caught(first=42)


def test_an_announcement_that_is_not_repeated_after_a_silence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerVersion, "reconnect", lambda weights: None)
    assert "deadlock" in caught(first=69)


def test_a_staged_version_that_was_not_announced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of a late message: a worker that staged an older version does not have what was announced since."""

    def take_any(state: RunState, event: version_rollout.WorkerVersionStaged) -> None:
        if (worker := state.workers.get(event.worker)) is not None and not worker.weights.has_turn:
            worker.weights.stage()

    monkeypatch.setattr(version_rollout, "version_staged", take_any)
    assert caught(first=150)


def test_a_quarantined_worker_that_counts_as_working_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_working(worker: Worker) -> bool:
        return worker.is_present and not worker.is_draining

    monkeypatch.setattr(Worker, "is_working", property(is_working))
    assert caught()


# ---------------------------------------------------------------- entries of the table


@pytest.mark.parametrize(
    ("state", "event", "mutant"),
    [
        (VersionState.LOADING, VersionEvent.OVERDUE, (VersionState.IDLE, (VersionAction.STOP_DEADLINE,))),
        (VersionState.LOADING, VersionEvent.FAILED, (VersionState.IDLE, (VersionAction.STOP_DEADLINE,))),
        (VersionState.LOADING, VersionEvent.LOADED_OLDER, TABLE[VersionState.LOADING][VersionEvent.LOADED]),
        (VersionState.LOADING, VersionEvent.STAGED, (VersionState.STAGED, ())),
        (VersionState.SWAPPING, VersionEvent.LOADED, (VersionState.SWAPPING, (VersionAction.SET_VERSION,))),
        (VersionState.SWAPPING, VersionEvent.FAILED, (VersionState.SWAPPING, ())),
        (VersionState.QUARANTINED, VersionEvent.ANNOUNCED, (VersionState.QUARANTINED, (VersionAction.SET_ANNOUNCED,))),
        (VersionState.RETRYING, VersionEvent.LOADED, (VersionState.QUARANTINED, (VersionAction.STOP_DEADLINE,))),
        (VersionState.IDLE, VersionEvent.REPLACED, (VersionState.IDLE, ())),
    ],
    ids=lambda one: one.name if not isinstance(one, tuple) else "",
)
def test_a_wrong_entry_is_caught(
    state: VersionState, event: VersionEvent, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE[state], event, mutant)  # type: ignore[arg-type]
    assert caught(first=51)


# ---------------------------------------------------------------- the lists of workers


CALLERS = (
    "join", "drain", "take_speed", "_take_leases_back", "version_loaded", "_quarantined", "_find_workers", "_unpin",
)  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS)
def test_a_change_of_a_worker_that_is_not_reported_to_the_lists_is_caught(
    caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _skip_changes_of(caller, monkeypatch)
    assert "out of date" in caught()


def test_a_released_engine_that_is_not_reported_to_the_lists_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Coordinator.handle_together

    def handle(coordinator: Coordinator, events: object, now_s: float) -> object:
        effects = honest(coordinator, events, now_s)  # type: ignore[arg-type]
        workers = coordinator._state.workers
        assert kept(workers) == looked_up(workers), "out of date"
        return effects

    monkeypatch.setattr(Coordinator, "handle_together", handle)
    run_colocated(1)
    _skip_changes_of("_engine", monkeypatch)
    with pytest.raises(AssertionError, match="out of date"):
        run_colocated(1)


def _skip_changes_of(caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Workers.changed

    def changed(workers: Workers, worker: Worker) -> None:
        if sys._getframe(1).f_code.co_name != caller:
            honest(workers, worker)

    monkeypatch.setattr(Workers, "changed", changed)
