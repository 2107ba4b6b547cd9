"""Who waits for whom, in words: what the watchdog reports and `areal-like status --why` shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from desk import Desk, batch_of

from controller.coordinator import wait_reasons
from controller.coordinator.events import CheckpointTaken, RunStarted, StopRequested, TrainerRestarted, WorkerDraining

STARTING = "all processes wait for the trainer to publish its starting version"


def started(*, workers: tuple[str, ...] = ("w0",), capacity: int = 64, **settings: Any) -> Desk:
    desk = Desk(**{"max_staleness": 0, "num_workers": len(workers), **settings})
    desk.start(workers=workers, capacity=capacity)
    return desk


def waits(desk: Desk) -> list[str]:
    return desk.coordinator.waits()


def test_before_the_first_version_all_wait_for_it_and_for_the_workers_that_are_missing() -> None:
    desk = Desk(num_workers=2)
    desk.do(RunStarted(lineage="l0", checkpoint_version=0))
    assert waits(desk) == [STARTING, "controller waits for 2 rollout worker(s) to register"]
    desk.join("w0")
    assert waits(desk) == [STARTING, "controller waits for 1 rollout worker(s) to register"]
    desk.join("w1")
    assert waits(desk) == [STARTING]


def test_a_run_in_which_all_work_waits_for_nothing() -> None:
    assert waits(started()) == []


def test_a_worker_that_has_not_loaded_the_newest_version_is_named_while_it_has_nothing_else_to_do() -> None:
    desk = started(groups_per_step=1)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    assert waits(desk) == ["w0 loads version 1"]
    desk.load("w0", 1)
    assert waits(desk) == []


def test_an_idle_worker_is_said_to_wait_for_the_next_version() -> None:
    desk = started(groups_per_step=2, workers=("w0", "w1"))
    idle = [line for line in waits(desk) if "idle" in line]
    held = {worker for worker, _ in desk.held.values()}
    assert len(idle) == 2 - len(held)
    for group_id in (0, 1):
        desk.finish(group_id)
    assert waits(desk) == [
        f"{name} is idle at version 0: 2 groups started, more only after the next version" for name in ("w0", "w1")
    ]


def test_the_trainers_wait_names_what_is_ready_and_who_holds_what_is_not() -> None:
    desk = started(groups_per_step=2)
    desk.finish(0)
    desk.ask(1)
    assert waits(desk) == ["trainer waits for batch 1: 1 of 2 groups ready; w0 holds 1 samples"]


def test_samples_that_nobody_holds_wait_for_a_worker() -> None:
    desk = started(groups_per_step=2)
    desk.finish(0)
    desk.ask(1)
    desk.lose("w0")
    assert waits(desk) == [
        "trainer waits for batch 1: 1 of 2 groups ready; samples of 1 groups wait for an eligible worker",
        "w0 is lost; its restart is awaited",
    ]


def test_groups_that_must_not_pass_their_deadline_are_named() -> None:
    """Groups 0 and 1 must be used in step 2: two others that are ready may not take their place."""
    desk = started(groups_per_step=2, max_staleness=1)
    for group_id in (2, 3):
        desk.finish(group_id)
    desk.ask(1)
    assert desk.coordinator.shipped == 1
    desk.ask(2)
    desk.publish(1)
    desk.load("w0", 1)
    for group_id in (4, 5):
        desk.finish(group_id, first=1)
    (line,) = waits(desk)[:1]
    assert line.startswith(
        "trainer waits for batch 2: 2 of 2 groups ready, but unfinished groups must not pass their deadline"
        " (soonest: [0, 1]); w0 holds"
    )


def test_of_groups_that_must_not_pass_their_deadline_those_of_the_next_two_steps_are_named() -> None:
    for bound, named in ((2, "[1, 2]"), (3, "later ones")):
        desk = started(groups_per_step=1, max_staleness=bound)  # groups 0 to `bound`, to be used up to step bound + 1
        desk.finish(0)
        desk.ask(1)
        desk.publish(1)
        desk.load("w0", 1)
        desk.finish(bound + 1, first=1)
        desk.ask(2)
        assert f"(soonest: {named})" in waits(desk)[0]


def test_a_batch_that_waits_for_an_evaluation_on_shared_devices_says_so() -> None:
    settings = {"num_eval_rows": 1, "eval_at_end": False, "groups_per_step": 1, "num_steps": 2, "max_staleness": None}
    desk = started(is_colocated=True, **settings)
    desk.finish(0)
    desk.ask(1)
    held = "trainer waits for batch 1: 1 of 1 groups ready, but an evaluation needs the engines first; w0 holds"
    assert waits(desk)[0].startswith(held)
    desk = started(**settings)
    desk.finish(0)
    desk.ask(1)
    assert not any("needs the engines" in line for line in waits(desk))


def test_a_run_that_is_trained_and_saved_waits_for_its_last_evaluation_alone() -> None:
    desk = started(groups_per_step=1, num_steps=1, num_eval_rows=2, eval_at_start=False)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    desk.do(CheckpointTaken(version=1, path="/c"))
    assert waits(desk) == ["final evaluation of version 1: 0 of 2 rows done, on w0"]


def test_a_lost_worker_is_awaited_unless_it_is_gone_for_good() -> None:
    desk = started(workers=("w0", "w1"))
    desk.lose("w1")
    assert "w1 is lost; its restart is awaited" in waits(desk)
    desk.lose("w1", is_permanent=True)
    assert "w1 is lost and not restarted" in waits(desk)
    assert "w1 is lost; its restart is awaited" not in waits(desk)


def test_a_worker_that_leaves_is_named_with_what_it_still_holds() -> None:
    desk = started(workers=("w0", "w1"), groups_per_step=4)
    held = sum(worker == "w0" for worker, _ in desk.held.values())
    assert held
    desk.do(WorkerDraining(worker="w0"))
    assert f"w0 leaves and hands back {held} samples" in waits(desk)
    for lease_id in [lease_id for lease_id, (worker, _) in desk.held.items() if worker == "w0"]:
        desk.give_back(lease_id, 0, [], "drain")
    assert "w0 leaves" in waits(desk)


def test_a_worker_that_cannot_load_is_quarantined_with_its_reason() -> None:
    desk = started(groups_per_step=1, max_load_attempts=1)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.fail("w0", 1)
    assert "w0 is quarantined, it could not load version 1: bad checksum" in waits(desk)


def test_an_evaluation_is_named_with_its_version_its_progress_and_its_workers() -> None:
    desk = started(num_eval_rows=3, workers=("w0", "w1"))
    assert waits(desk)[-1] == "baseline evaluation of version 0: 0 of 3 rows done, on w0, w1"
    desk.finish(1, purpose="eval")
    assert waits(desk)[-1] == "baseline evaluation of version 0: 1 of 3 rows done, on w0, w1"
    for name in ("w0", "w1"):
        desk.lose(name)
    assert waits(desk)[-1] == "baseline evaluation of version 0: 1 of 3 rows done, on no worker yet"


@pytest.mark.parametrize(("trained", "base", "step"), [(0, 4, 5), (5, 4, 6)])
def test_a_resumed_run_that_ends_names_the_step_after_its_checkpoint(trained: int, base: int, step: int) -> None:
    trainer = SimpleNamespace(trained=trained, base=base, checkpoints={})
    state = SimpleNamespace(trainer=trainer, ending=SimpleNamespace(last_step=6, reason="SIGINT"))
    assert wait_reasons._ending(state) == [  # type: ignore[arg-type]
        f"the run ends (SIGINT): waits for the trainer to finish step {step}"
    ]


def test_a_stopped_run_says_what_it_still_waits_for() -> None:
    desk = started(groups_per_step=1)
    desk.finish(0)
    desk.ask(1)
    desk.do(StopRequested(reason="SIGINT"))
    assert waits(desk)[0] == "the run ends (SIGINT): waits for the trainer to finish step 1"
    desk.publish(1)
    assert waits(desk)[0] == "the run ends (SIGINT): waits for the trainer's checkpoint of version 1"
    desk.do(CheckpointTaken(version=1, path="/c"))
    assert waits(desk) == [], "it is over"


def test_a_trainer_that_starts_again_is_waited_for_with_its_version() -> None:
    desk = started(groups_per_step=1)
    for step in (1, 2):
        desk.finish(step - 1, first=step - 1)
        desk.ask(step)
        desk.publish(step)
        desk.load("w0", step)
    batches = (batch_of(2, 1),)
    desk.do(TrainerRestarted(reason="killed", lineage="l1", checkpoint_version=1, batches=batches))
    assert waits(desk)[0] == "the trainer restarts from version 1"
