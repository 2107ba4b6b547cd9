"""What a lost process means for the run: a note, a restart, or the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import ProcessDied
from areal_like.process import DIVERGED
from controller.coordinator.events import TrainerLost, TrainerRestarted, WorkerLost
from controller.runtime.loss_handler import LossHandler
from controller.runtime.outcome import RunEnd
from controller.runtime.supervisor import Loss
from controller.runtime.trainer_progress import TrainerProgress

RESTARTED = TrainerRestarted(reason="trainer: killed", lineage="l1", checkpoint_version=4, batches=())


class Bench:
    """Two rollout workers; the other roles as named."""

    def __init__(self, *, watched: tuple[str, ...] = ()) -> None:
        self.notes: list[tuple[str, str]] = []
        self.events: list[Any] = []
        self.lost: list[str] = []
        self.failed_checkpoints: list[str] = []
        self.started: list[Coroutine[Any, Any, None]] = []
        self.end = RunEnd()
        self.trainer = TrainerProgress(SimpleNamespace(trained=2))  # type: ignore[arg-type]
        components = SimpleNamespace(
            supervisor=SimpleNamespace(
                died=lambda loss: ProcessDied(loss.name, loss.reason, "last words"),
                watches_role=lambda role: role in watched,
                names_of=lambda role: {"rollout-0", "rollout-1"},
            ),
            worker_admin=SimpleNamespace(checkpoint_failed=self.failed_checkpoints.append),
            trainer_restart=SimpleNamespace(begin=self.begin),
            end=self.end,
            telemetry=SimpleNamespace(display=SimpleNamespace(note=lambda text, kind: self.notes.append((text, kind)))),
        )
        self.handler = LossHandler(
            components,  # type: ignore[arg-type]
            SimpleNamespace(handle=lambda burst: self.events.extend(one.event for one in burst)),  # type: ignore[arg-type]
            monitor=SimpleNamespace(lost=lambda loss: self.lost.append(loss.name)),  # type: ignore[arg-type]
            trainer=self.trainer,
            start=self.start,
        )

    async def begin(self, loss: Loss) -> tuple[TrainerRestarted, list[str]]:
        return RESTARTED, [f"{loss.name}: checkpoint 5 is skipped"]

    def start(self, work: Coroutine[Any, Any, None]) -> Any:
        self.started.append(work)
        return SimpleNamespace(done=lambda: False)

    def lose(self, name: str, *, is_permanent: bool = False, reason: str = "killed", **facts: Any) -> None:
        role: Any = name.split("-")[0]
        self.handler.take(Loss(name, role, reason, is_permanent, **facts))


@pytest.mark.parametrize(
    ("is_permanent", "note"), [(False, "rollout-0: killed; restarting it"), (True, "rollout-0: killed; not restarted")]
)
def test_a_lost_worker_is_the_coordinators_and_noted_with_what_follows(is_permanent: bool, note: str) -> None:
    bench = Bench()
    bench.lose("rollout-0", is_permanent=is_permanent, may_live=not is_permanent)
    assert bench.events == [
        WorkerLost(worker="rollout-0", reason="killed", is_permanent=is_permanent, may_live=not is_permanent)
    ]
    assert bench.notes == [(note, "warning")]
    assert bench.lost == ["rollout-0"]
    assert (bench.end.outcome, bench.end.death is not None) == (None, is_permanent)


def test_a_trainer_within_its_budget_goes_on_from_its_checkpoint() -> None:
    bench = Bench()
    assert not bench.handler.is_restarting()
    bench.lose("trainer")
    assert bench.handler.is_restarting()
    assert (bench.end.outcome, bench.end.death, bench.notes) == (None, None, [])
    (work,) = bench.started
    asyncio.run(work)
    assert bench.failed_checkpoints == ["the trainer died (killed)"]
    assert bench.notes == [("trainer: checkpoint 5 is skipped", "warning")]
    assert bench.trainer.saved_version == 4
    assert bench.events == [RESTARTED]


def test_a_restart_that_is_over_is_not_under_way() -> None:
    bench = Bench()
    bench.lose("trainer")
    bench.started[0].close()
    assert bench.handler.restart is not None
    bench.handler.restart.done = lambda: True  # type: ignore[method-assign]
    assert not bench.handler.is_restarting()


def test_a_trainer_lost_for_good_ends_the_run_and_the_coordinator_knows() -> None:
    bench = Bench()
    bench.lose("trainer", is_permanent=True)
    assert bench.end.outcome is not None
    assert (bench.end.outcome.status, bench.end.outcome.reason) == ("failed", "trainer: killed")
    assert bench.end.outcome.error is bench.end.death is not None
    assert bench.events == [TrainerLost(reason="trainer: killed")]


def test_a_trainer_whose_work_is_done_is_no_loss() -> None:
    bench = Bench()
    bench.trainer.last_step, bench.trainer.saved_version = 2, 2
    bench.lose("trainer", is_permanent=True)
    assert (bench.lost, bench.events, bench.end.outcome, bench.end.death) == ([], [], None, None)
    bench.lose("rollout-0")
    assert bench.lost == ["rollout-0"], "another process is"


@pytest.mark.parametrize(("last_step", "trained", "saved", "is_done"), [
    (None, 2, 2, False), (2, 2, 2, True), (2, 1, 2, False), (2, 2, 1, False), (2, 3, 3, True), (0, 0, -1, False),
])  # fmt: skip
def test_a_trainer_is_done_with_the_last_step_trained_and_saved(
    last_step: int | None, trained: int, saved: int, is_done: bool
) -> None:
    assert TrainerProgress(SimpleNamespace(trained=trained)).saved_version == -1  # type: ignore[arg-type]
    progress = TrainerProgress(SimpleNamespace(trained=trained), last_step, saved)  # type: ignore[arg-type]
    assert progress.is_done() == is_done


@pytest.mark.parametrize(
    ("watched", "is_permanent", "note", "ends"),
    [
        ((), False, "reward-0: killed; restarting it", False),
        (("reward",), True, "reward-0: killed; not restarted, the other reward services continue", False),
        ((), True, "", True),
        (("rollout",), True, "", True),
    ],
)
def test_reward_services_end_the_run_only_when_the_last_is_lost_for_good(
    watched: tuple[str, ...], is_permanent: bool, note: str, ends: bool
) -> None:
    bench = Bench(watched=watched)
    bench.lose("reward-0", is_permanent=is_permanent)
    assert bench.notes == ([(note, "warning")] if note else [])
    assert (bench.end.outcome is not None) == ends
    assert bench.events == []


def test_a_policy_has_diverged_when_the_trainer_says_so() -> None:
    bench = Bench()
    bench.lose("trainer", reason="the loss is not finite", returncode=DIVERGED)
    assert bench.end.outcome is not None
    assert (bench.end.outcome.reason, bench.started) == ("the loss is not finite", [])
    assert isinstance(bench.end.outcome.error, ProcessDied)


def test_a_policy_has_diverged_when_every_worker_says_so_and_none_has_finished_a_sample_since() -> None:
    bench = Bench()
    bench.lose("rollout-0", returncode=DIVERGED)
    bench.handler.finished_sample("rollout-0")
    bench.handler.finished_sample("rollout-1")
    bench.lose("rollout-1", returncode=DIVERGED)
    assert bench.end.outcome is None
    bench.lose("rollout-0", returncode=1)
    assert bench.end.outcome is None, "another fault is no divergence"
    bench.lose("rollout-0", returncode=DIVERGED)
    assert bench.end.outcome is not None
    assert len(bench.events) == 3, "the last one ends the run"
