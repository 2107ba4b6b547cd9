"""The asyncio and ZeroMQ shell around the pure coordinator: loops, clock, stop and shutdown.

Decisions about samples are in coordinator.py, messages are read in message_intake.py, the ledger's transaction and
sends are in effect_dispatcher.py, losses of processes in loss_handler.py and supervisor.py, display and files in
telemetry/.

Map of the loops, all in one TaskGroup:

- `_receive` waits for the hub, at most RECEIVE_S; any process of the run wakes it. It handles messages in bursts.
- `_tick` runs every TICK_S: a requested stop, processes (supervisor), deadlines (the coordinator's Tick), requests,
  display, watchdog.
- The restart of the trainer is one task for each loss, started by `_tick`, which continues meanwhile. It waits for the
  ranks to exit and for a thread that reads checkpoints, both with their own deadlines, then notifies the coordinator.

`run` waits for `RunEnd.over`. It is set by the coordinator's EndRun (effect_dispatcher.py), a fatal loss
(loss_handler.py) or a second signal (`request_stop`); `run` then cancels every loop. An error in a loop ends the group
and with it the run. The watchdog in `_tick` is the deadline of all loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.errors import OperationError, UserError
from areal_like.process import first_cause
from areal_like.wire import messages as m
from controller.coordinator.events import EarlyStopReached, Event, StopRequested, Tick, WorkerEnded
from controller.runtime.client_waits import client_waits
from controller.runtime.components import RunComponents
from controller.runtime.effect_dispatcher import EffectDispatcher
from controller.runtime.inbound import InboundEvent
from controller.runtime.loss_handler import LossHandler
from controller.runtime.message_intake import Burst, MessageIntake
from controller.runtime.monitor import Monitor
from controller.runtime.outbound import Outgoing, TaskSettings
from controller.runtime.outcome import Outcome, StoppedAtOnce
from controller.runtime.trainer_progress import TrainerProgress
from controller.runtime.watchdog import Watchdog
from controller.telemetry.step_reporter import StepReporter

log = logging.getLogger(__name__)

RECEIVE_S = 0.2
TICK_S = 0.2
BURST = 256
"""Maximum messages of one ledger transaction, which limits the delay of an acknowledgement."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the shell; times in seconds."""

    tasks: TaskSettings
    num_steps: int
    stop_on_long_prompt: bool
    stall_after_s: float
    stop_grace_s: float
    client_addresses: Mapping[str, str] = field(default_factory=dict)
    """Addresses of clients outside the run, by rollout worker."""


class Server:
    """Runs one job until it is over. `run` returns the outcome; no recorded data is lost in any case."""

    def __init__(
        self,
        settings: ServerSettings,
        components: RunComponents,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        supervisor, telemetry = components.supervisor, components.telemetry
        self._settings, self._parts, self._end, self._clock = settings, components, components.end, clock
        self._hub, self._supervisor, self._telemetry = components.hub, supervisor, telemetry
        self._trainer = TrainerProgress(components.coordinator)
        self._watchdog = Watchdog(
            stall_after_s=settings.stall_after_s, stop_grace_s=settings.stop_grace_s, now_s=clock()
        )
        steps = StepReporter(
            telemetry.tally, telemetry.display, telemetry.journal,
            num_steps=settings.num_steps, bound=components.coordinator.settings.max_staleness, clock=clock,
        )  # fmt: skip
        out = Outgoing(
            components.hub, components.ledger, components.rows, settings.tasks,
            is_live=components.coordinator.is_live,
            on_unreachable=lambda name: supervisor.lost_touch(name, clock()),
        )  # fmt: skip
        self._monitor = Monitor(components, steps=steps, clock=clock, client_addresses=settings.client_addresses)
        self._dispatcher = EffectDispatcher(components, out, trainer=self._trainer, steps=steps, clock=clock)
        self._losses = LossHandler(
            components, self._dispatcher, monitor=self._monitor, trainer=self._trainer, start=self._start
        )
        self._intake = MessageIntake(
            components, out, losses=self._losses, monitor=self._monitor, trainer=self._trainer, clock=clock
        )
        self._stop_reason = ""
        self._is_stop_sent = False

    @property
    def saved_version(self) -> int:
        """Version of the newest checkpoint that was reported; -1: none yet."""
        return self._trainer.saved_version

    # ------------------------------------------------------------ life

    async def run(self, first_events: Sequence[Event]) -> Outcome:
        """Serve until the run is over. `first_events` start the coordinator (RunStarted, ...)."""
        try:
            self._dispatcher.handle([InboundEvent(event) for event in first_events])
            async with asyncio.TaskGroup() as self._group:
                loops = [self._start(self._receive()), self._start(self._tick())]
                await self._end.over.wait()  # _tick's watchdog is the deadline
                for loop in [*loops, self._losses.restart] if self._losses.restart else loops:
                    loop.cancel()
        except* (UserError, OperationError, OSError) as errors:
            self._end.outcome = Outcome.of(first_cause(errors))
        assert self._end.outcome is not None
        return self._end.outcome

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._group.create_task(work)

    def request_stop(self, reason: str) -> None:
        """First call: finish the current step, save, end. Second call, or a call after the end: do not wait any more.

        Called by a signal handler at any time, so it only records the request: `_tick` carries it out.
        """
        if self._end.outcome is not None:
            self._end.is_hurried = True
        elif not self._stop_reason:
            self._stop_reason = reason
            self._telemetry.display.note(
                f"{reason}: finishing the current step and saving (repeat to stop immediately)", "warning"
            )
        else:
            self._end.is_hurried = True
            self._end.decide(Outcome("stopped", f"{reason} twice: stopped at once", StoppedAtOnce()))

    async def farewell(self, grace_s: float) -> None:
        """Notify every process to exit; samples that they have finished meanwhile are still recorded."""
        deadline_s = self._clock() + grace_s
        with contextlib.suppress(OSError):  # a full disk may be the reason of the end
            self._monitor.last()
        for name in list(self._hub.peers):
            self._dismiss(name, grace_s)
        while not self._end.is_hurried and (left_s := deadline_s - self._clock()) > 0 and self._is_somebody_here():
            await self._take_last_words(RECEIVE_S, left_s)
        for _ in range(BURST):
            if not await self._take_last_words(0.0, 0.0):
                break
        with contextlib.suppress(OSError):  # a full disk may be the reason of the end
            self._telemetry.journal.measure(
                "counters", hub=dict(self._hub.counters), processes=self._telemetry.tally.totals()
            )

    def _is_somebody_here(self) -> bool:
        return any(self._supervisor.is_running(name) for name in self._hub.peers)

    def _dismiss(self, name: str, grace_s: float) -> None:
        self._supervisor.release(name)
        self._hub.send(name, m.Shutdown(reason="the run is over", deadline_s=grace_s))

    async def _take_last_words(self, timeout_s: float, grace_s: float) -> bool:
        received = await self._hub.receive(timeout_s)
        if received is None:
            return False
        peer, message = received
        try:
            if isinstance(message, m.Hello):
                self._dismiss(peer, grace_s)  # it registered only now
            else:
                self._take_in([received])
        except (UserError, OperationError, OSError) as error:
            log.warning(
                "an error occurred while the run was ending: %s", error
            )  # the reason of the end is already known
        return True

    # ------------------------------------------------------------ messages in

    async def _receive(self) -> None:
        while True:
            burst: list[tuple[str, m.Message]] = []
            try:
                received = await self._hub.receive(RECEIVE_S)
                while received is not None:
                    burst.append(received)
                    received = await self._hub.receive(0.0) if len(burst) < BURST else None
            finally:  # also when cancelled: messages taken from the hub are not lost
                self._take_in(burst)

    def _take_in(self, burst: Burst) -> None:
        received, mistakes = self._intake.events(burst), self._intake.mistakes(burst)
        self._dispatcher.handle(received)
        self._intake.release_finished_trainer(burst)
        if mistakes and self._settings.stop_on_long_prompt:
            raise mistakes[0]

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        while True:
            now_s = self._clock()
            if self._stop_reason and not self._is_stop_sent:
                self._is_stop_sent = True
                self._watchdog.stop_requested(now_s)
                self._dispatcher.handle([InboundEvent(StopRequested(reason=self._stop_reason))])
            if reason := self._parts.watch.take_stop():
                self._telemetry.display.note(reason)
                self._dispatcher.handle([InboundEvent(EarlyStopReached(reason=reason))])
            if self._end.outcome is not None:
                return
            for loss in await self._supervisor.tick(now_s):
                self._losses.take(loss)
            if ended := self._supervisor.take_ended():
                self._dispatcher.handle([InboundEvent(WorkerEnded(worker=name)) for name in ended])
            for words in self._supervisor.take_news():
                self._telemetry.display.note(words, "warning")
            self._dispatcher.handle([*self._parts.worker_admin.tick(now_s), InboundEvent(Tick())])
            self._monitor.tick()
            self._watch(now_s)
            await asyncio.sleep(TICK_S)

    def _watch(self, now_s: float) -> None:
        tally, coordinator = self._telemetry.tally, self._parts.coordinator
        counted = tally.total("rollout", "tokens"), tally.total("trainer", "micro_batches")
        has_own_deadline = self._losses.is_restarting() or self._supervisor.is_pool_unplaced()
        if coordinator.is_batch_awaited and client_waits(self._supervisor.states(), self._settings.client_addresses):
            has_own_deadline = True  # a client's: nobody in the run can end this wait
        progress = (coordinator.progress, counted, self._supervisor.restarts, now_s if has_own_deadline else 0.0)
        if warning := self._watchdog.look(now_s, progress, coordinator.waits()):
            self._telemetry.display.note(warning, "warning")
