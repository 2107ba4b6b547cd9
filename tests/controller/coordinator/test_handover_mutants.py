"""Seeded mutants of the handover of shared devices: the random colocated schedules must catch every guard that is gone.

Each test takes one entry of the transition tables (controller/coordinator/handover.py), or one guard around them, away.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from colocated_schedules import KINDS, run_colocated
from example_counts import num_examples
from linked_cluster import LinkedCluster

from controller.coordinator import colocation
from controller.coordinator.events import Event, WorkerLost
from controller.coordinator.handover import (
    ENGINE,
    TURNS,
    Engine,
    EngineAction,
    EngineEvent,
    Turn,
    TurnAction,
    TurnEvent,
)
from controller.coordinator.run_parts import DeviceState
from controller.coordinator.run_state import RunState

MAX_SEEDS = 400


def caught(*kinds: str, num_seeds: int = MAX_SEEDS) -> str:
    """The first complaint over many schedules; empty where none complains."""
    for seed in range(num_seeds):
        try:
            run_colocated(seed, kinds[seed % len(kinds)])
        except (AssertionError, KeyError) as error:
            return str(error) or "assertion inside the coordinator"
    return ""


def test_the_unchanged_tables_pass_what_the_mutants_fail() -> None:
    assert caught(*KINDS, num_seeds=num_examples(5) * len(KINDS)) == ""


def test_a_batch_for_a_trainer_that_has_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: the next batch of a replay is known while the trainer is at work."""
    monkeypatch.setitem(TURNS[Turn.TRAINER], TurnEvent.BATCH_READY, (Turn.TRAINER, (TurnAction.SEND_BATCH,)))
    monkeypatch.setattr(colocation, "may_hand_over", lambda state, step: not _is_engine_busy(state))
    assert "hold memory" in caught("replay_far")


def _is_engine_busy(state: RunState) -> bool:
    return bool(state.evaluations.jobs) or any(
        worker.outstanding for worker in state.workers.values() if worker.is_present
    )


def test_a_batch_sent_before_the_engines_are_empty_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        TURNS[Turn.ENGINES], TurnEvent.BATCH_READY, (Turn.TRAINER, (TurnAction.HOLD_BATCH, TurnAction.SEND_BATCH))
    )
    assert "hold memory" in caught("steady")


def test_a_batch_that_is_not_sent_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(devices: DeviceState, step: int) -> bool:
        return False

    monkeypatch.setattr(colocation, "_is_again", never)
    assert "deadlock" in caught("trainer_out_of_reach")


def test_a_batch_held_for_a_dead_trainer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays the trainer's turn to come, although that trainer is gone."""
    monkeypatch.setitem(TURNS[Turn.RELEASING], TurnEvent.TRAINER_DIED, (Turn.RELEASING, ()))
    assert caught("trainer_deaths", "handovers")


def test_an_answer_to_an_earlier_request_that_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: the version announced meanwhile takes memory."""
    monkeypatch.setattr(colocation, "_is_answer", lambda worker, event: EngineEvent.RELEASED in ENGINE[worker.engine])
    assert "hold memory" in caught("delay_second_answer")


def test_an_engine_that_keeps_its_version_when_it_is_asked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: after the trainer's death in the handover it is leased to, and then it releases its memory."""
    monkeypatch.setitem(ENGINE[Engine.HOLDING], EngineEvent.WANTED, (Engine.RELEASING, (EngineAction.REQUEST_RELEASE,)))
    monkeypatch.setitem(ENGINE[Engine.RELEASING], EngineEvent.RELEASED, (Engine.EMPTY, (EngineAction.FORGET,)))
    assert "deadlock" in caught("kill_twice")


def test_an_engine_out_of_reach_that_counts_as_empty_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _take_every_loss_for_an_end(monkeypatch)
    assert "hold memory" in caught("silences")


def test_a_killed_engine_that_counts_as_empty_before_it_is_gone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _take_every_loss_for_an_end(monkeypatch)
    assert "hold memory" in caught("worker_deaths")


def _take_every_loss_for_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LinkedCluster.handle_burst

    def handle_burst(cluster: LinkedCluster, burst: list[Any], **options: bool) -> None:
        real(cluster, [(_as_ended(event), tokens) for event, tokens in burst], **options)

    monkeypatch.setattr(LinkedCluster, "handle_burst", handle_burst)


def _as_ended(event: Event) -> Event:
    return msgspec.structs.replace(event, may_live=False) if isinstance(event, WorkerLost) else event


def test_an_engine_that_is_not_asked_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINE[Engine.RELEASING], EngineEvent.BACK, (Engine.RELEASING, ()))
    assert caught("silences")


@pytest.mark.parametrize("state", [Engine.HOLDING, Engine.RELEASING, Engine.ENDING])
def test_a_dead_engine_that_keeps_its_memory_is_caught(state: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINE[state], EngineEvent.ENDED, (state, (EngineAction.FORGET,)))
    assert caught("worker_deaths")


def test_an_engine_that_never_releases_and_is_not_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINE[Engine.RELEASING], EngineEvent.OVERDUE, (Engine.ENDING, ()))
    assert "deadlock" in caught("worker_deaths")
