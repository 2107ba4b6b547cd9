"""Handles the loss of a process: a note, a restart of the trainer, or the end of the run.

Losses are detected and other processes restarted in supervisor.py; the consequences for samples are in coordinator.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from controller.coordinator.events import TrainerLost, WorkerLost
from controller.runtime.components import RunComponents
from controller.runtime.effect_dispatcher import EffectDispatcher
from controller.runtime.inbound import InboundEvent
from controller.runtime.monitor import Monitor
from controller.runtime.outcome import Outcome
from controller.runtime.supervisor import Loss
from controller.runtime.trainer_progress import TrainerProgress

log = logging.getLogger(__name__)


class LossHandler:
    """Handles losses. `start(work)`: runs it as a task that ends with the server's loops."""

    def __init__(
        self,
        components: RunComponents,
        dispatcher: EffectDispatcher,
        *,
        monitor: Monitor,
        trainer: TrainerProgress,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._supervisor, self._worker_admin = components.supervisor, components.worker_admin
        self._trainer_restart, self._end = components.trainer_restart, components.end
        self._display = components.telemetry.display
        self._dispatcher, self._monitor, self._trainer, self._start = dispatcher, monitor, trainer, start
        self.restart: asyncio.Task[None] | None = None
        """The task that restarts the trainer."""
        self._diverged: set[str] = set()
        """Rollout workers that exited because the policy has diverged, and have finished no sample since."""

    def is_restarting(self) -> bool:
        """Return whether the trainer is being restarted; the restart has its own deadlines."""
        return self.restart is not None and not self.restart.done()

    def finished_sample(self, worker: str) -> None:
        """Record that the worker has finished a sample, so its policy is not divergent."""
        self._diverged.discard(worker)

    def take(self, loss: Loss) -> None:
        """Report the loss; notify the coordinator, restart the trainer or end the run."""
        note = f"{loss.name}: {loss.reason}"
        if loss.role == "trainer" and self._trainer.is_done():
            log.warning("%s; this has no effect, because the trainer has already finished its work", note)
            return
        self._monitor.lost(loss)
        if loss.is_permanent:
            self._end.death = self._supervisor.died(loss)
        if loss.is_divergence and self._has_diverged(loss):
            self._end.decide(Outcome("failed", loss.reason, self._supervisor.died(loss)))
        elif loss.role == "rollout":
            self._display.note(note + ("; not restarted" if loss.is_permanent else "; restarting it"), "warning")
            lost = WorkerLost(
                worker=loss.name, reason=loss.reason, is_permanent=loss.is_permanent, may_live=loss.may_live,
                may_return=loss.may_return,
            )  # fmt: skip
            self._dispatcher.handle([InboundEvent(lost)])
        elif loss.role == "trainer" and not loss.is_permanent:
            self.restart = self._start(self._restart_trainer(loss))
        elif not loss.is_permanent:
            self._display.note(note + "; restarting it", "warning")
        elif loss.role == "reward" and self._supervisor.watches_role("reward"):
            self._display.note(note + "; not restarted, the other reward services continue", "warning")
        else:
            self._end.decide(Outcome("failed", note, self._end.death))
            if loss.role == "trainer":
                self._dispatcher.handle([InboundEvent(TrainerLost(reason=note))])

    async def _restart_trainer(self, loss: Loss) -> None:
        """It goes on from its last checkpoint; what is shown of it is the coordinator's note."""
        self._worker_admin.checkpoint_failed(f"the trainer died ({loss.reason})")
        event, warnings = await self._trainer_restart.begin(loss)
        for words in warnings:
            self._display.note(words, "warning")
        self._trainer.saved_version = event.checkpoint_version
        self._dispatcher.handle([InboundEvent(event)])

    def _has_diverged(self, loss: Loss) -> bool:
        """Return whether the policy has diverged: reported by the trainer, or by every rollout worker, because a single
        one may have another fault (`atomic-versions`).
        """
        if loss.role == "rollout":
            self._diverged.add(loss.name)
        return loss.role == "trainer" or self._diverged.issuperset(self._supervisor.names_of("rollout"))
