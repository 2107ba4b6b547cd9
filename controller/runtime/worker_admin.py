"""Handles requests to a running run: drain or add rollout workers, save a checkpoint; and reports workers' speeds.

Samples are handled by the coordinator, processes are started and ended in supervisor.py, files of requests are in
control_requests.py.

A worker that receives a spot notice and one that is drained by request behave the same: it sends Draining, returns its
leases, sends Goodbye. The only worker that the run started is not drained: a request is refused, and if it exits
nevertheless, it is restarted. External workers leave whenever they want.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_like.transport.channel import Hub
from areal_like.wire import messages as m
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import AddWorker, RetireWorker
from controller.coordinator.events import WorkerDraining, WorkerLost, WorkerSpeed
from controller.runtime.control_requests import Request, Requests
from controller.runtime.inbound import InboundEvent
from controller.runtime.supervisor import LEAVE_S, Supervisor
from controller.runtime.throughput_gauge import SpeedGauge

Say = Callable[[str], None]
MAX_SAVERS = 64
SHUTDOWN_S = LEAVE_S / 3
"""Time for a drained worker to send its last answers and receive their acknowledgement."""


class WorkerAdmin:
    """Call `tick` often, and `draining` and `goodbye` for the messages of a rollout worker.

    `add_worker()` adds a new worker to the supervisor and returns its name.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        supervisor: Supervisor,
        hub: Hub,
        requests: Requests,
        *,
        add_worker: Callable[[], str],
        say: Say,
    ) -> None:
        self._coordinator, self._supervisor, self._hub, self._requests = coordinator, supervisor, hub, requests
        self._add_worker, self._say = add_worker, say
        self._gauge = SpeedGauge()
        self._leaving: set[str] = set()
        """Workers allowed to drain; the coordinator is notified of a burst of announcements only later."""
        self._scalings: list[AddWorker | RetireWorker] = []
        """Decisions of autoscaling that are not carried out yet."""
        self._pending_checkpoints: list[tuple[int, str]] = []
        """Requests for a checkpoint without an answer of the trainer: its version at that time, and the request's
        key.
        """

    def tick(self, now_s: float) -> list[InboundEvent]:
        """Handle requests and decisions of autoscaling; report changed speeds."""
        events = [
            event for request in self._requests.take() if (event := self._handle_request(request, now_s)) is not None
        ]
        scalings, self._scalings = self._scalings, []
        events += [event for effect in scalings if (event := self._carry_out(effect, now_s)) is not None]
        for name, info in self._hub.peers.items():
            if info.role == "rollout" and info.heartbeat is not None:
                speed = self._gauge.read(name, info.incarnation, info.heartbeat.counters)
                if speed is not None:
                    events.append(InboundEvent(WorkerSpeed(worker=name, tokens_per_s=speed[0], steps_per_s=speed[1])))
        return events

    def draining(self, worker: str, now_s: float) -> InboundEvent:
        """Handle the announcement of a worker that it drains."""
        if self._may_leave(worker):
            self._let_leave(worker, now_s)
        return self._reported(worker)

    def _may_leave(self, worker: str) -> bool:
        return self._supervisor.is_external(worker) or self._coordinator.can_spare({worker, *self._leaving})

    def _reported(self, worker: str) -> InboundEvent:
        info = self._hub.peers.get(worker)
        return InboundEvent(WorkerDraining(worker=worker, incarnation=info.incarnation if info else None))

    def _let_leave(self, worker: str, now_s: float) -> None:
        self._leaving.add(worker)
        self._supervisor.leaving(worker, now_s)

    def goodbye(self, worker: str, reason: str) -> InboundEvent:
        """Handle the worker's Goodbye. A worker that announced its exit, or was requested to, is permanently removed;
        others are evaluated by the supervisor.
        """
        self._leaving.discard(worker)
        is_gone = self._supervisor.is_external(worker) or self._supervisor.is_leaving(worker)
        if is_gone:
            self._supervisor.release(worker)
        return InboundEvent(
            WorkerLost(worker=worker, reason=reason or "announced its exit", is_permanent=is_gone, may_live=True)
        )

    # ------------------------------------------------------------ autoscaling

    def scale(self, effect: AddWorker | RetireWorker) -> None:
        """Take a decision of autoscaling, which the next `tick` carries out."""
        self._scalings.append(effect)

    def _carry_out(self, effect: AddWorker | RetireWorker, now_s: float) -> InboundEvent | None:
        if self._coordinator.is_over:
            return None
        if isinstance(effect, AddWorker):
            if self._num_own() < effect.max_workers:  # else one that was added earlier is still starting
                self._add()
            return None
        info = self._hub.peers.get(effect.worker)
        if info is None or info.incarnation != effect.incarnation or self._refusal(effect.worker):
            return None  # it has ended meanwhile, or is the last one: the decision counts as failed
        return self._drain(effect.worker, now_s)

    def _num_own(self) -> int:
        """Number of workers that the run started and that stay, including those that start or restart."""
        names = self._supervisor.names_of("rollout")
        return sum(not self._supervisor.is_external(name) and not self._supervisor.is_leaving(name) for name in names)

    # ------------------------------------------------------------ requests

    def _handle_request(self, request: Request, now_s: float) -> InboundEvent | None:
        if request.wish == "add":
            self._requests.answer(request.key, self._add(), is_granted=True)
            return None
        if request.wish == "checkpoint":
            self._ask_for_checkpoint(request)
            return None
        if refusal := self._refusal(request.worker):
            self._requests.answer(request.key, refusal, is_granted=False)
            return None
        event = self._drain(request.worker, now_s)
        self._requests.answer(request.key, request.worker, is_granted=True)
        return event

    def _add(self) -> str:
        """Add a worker; return its name."""
        name = self._add_worker()
        self._leaving.discard(name)
        self._say(f"{name} is added")
        return name

    def _drain(self, worker: str, now_s: float) -> InboundEvent:
        self._let_leave(worker, now_s)
        self._hub.send(worker, m.Shutdown(reason="drained", deadline_s=SHUTDOWN_S))
        return self._reported(worker)

    def _ask_for_checkpoint(self, request: Request) -> None:
        """Request a checkpoint; the request is answered by checkpoint_saved or checkpoint_failed."""
        if len(self._pending_checkpoints) >= MAX_SAVERS:
            self._requests.answer(request.key, "too many requests are pending", is_granted=False)
        elif not self._hub.send("trainer", m.SaveCheckpoint(reason="a user requested a checkpoint")):
            text = (
                "no trainer is running at the moment, because it is starting, or because the run is evaluating or "
                "ending"
            )
            self._requests.answer(request.key, text, is_granted=False)
        else:
            self._pending_checkpoints.append((self._coordinator.trained, request.key))

    def checkpoint_saved(self, version: int, path: str) -> None:
        """Handle a complete checkpoint: answer the requests made when the trainer had reached at most this version."""
        for asked, key in self._pending_checkpoints:
            if asked <= version:
                self._requests.answer(key, path, is_granted=True)
        self._pending_checkpoints = [(asked, key) for asked, key in self._pending_checkpoints if asked > version]

    def checkpoint_failed(self, reason: str) -> None:
        """Handle a failed checkpoint, or the loss of the trainer."""
        for _, key in self._pending_checkpoints:
            self._requests.answer(key, reason, is_granted=False)
        self._pending_checkpoints.clear()

    def _refusal(self, worker: str) -> str:
        """Why this worker cannot be drained now; empty if it can."""
        info = self._hub.peers.get(worker)
        if info is None or info.role != "rollout":
            known = ", ".join(sorted(name for name, peer in self._hub.peers.items() if peer.role == "rollout"))
            return f"no rollout worker {worker!r} is connected; connected workers: {known or 'none yet'}"
        if self._coordinator.is_over:
            return "the run is over"
        if not self._may_leave(worker):
            others = [name for name in self._supervisor.names_of("rollout") if self._supervisor.is_external(name)]
            only = "the only rollout worker that the run started" if others else "the only rollout worker"
            return f"{worker} is {only}; first add another one with areal-like add, or stop the run"
        return ""
