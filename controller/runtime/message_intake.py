"""Reads the messages of processes: checks them, updates measurements and display, and converts them to events.

The mapping from message to event is in inbound.py; events are handled in effect_dispatcher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from areal_like.errors import UserError
from areal_like.wire import messages as m
from controller.coordinator.events import WorkerJoined
from controller.runtime.components import RunComponents
from controller.runtime.inbound import SPEAKERS, InboundEvent, translate
from controller.runtime.loss_handler import LossHandler
from controller.runtime.monitor import Monitor
from controller.runtime.outbound import Outgoing
from controller.runtime.trainer_progress import TrainerProgress

Burst = Sequence[tuple[str, m.Message]]
"""Messages in order of arrival, each with its sender."""


class MessageIntake:
    """Converts bursts of messages. For each burst call `events`, handle them, then call `release_finished_trainer`."""

    def __init__(
        self,
        components: RunComponents,
        outgoing: Outgoing,
        *,
        losses: LossHandler,
        monitor: Monitor,
        trainer: TrainerProgress,
        clock: Callable[[], float],
    ) -> None:
        self._supervisor, self._worker_admin = components.supervisor, components.worker_admin
        self._display, self._journal = components.telemetry.display, components.telemetry.journal
        self._watch, self._admission = components.watch, components.admission
        self._tracer, self._out, self._losses = components.tracer, outgoing, losses
        self._monitor, self._trainer, self._clock = monitor, trainer, clock
        self._roles: dict[str, m.Role] = {}

    def events(self, burst: Burst) -> list[InboundEvent]:
        """The events of the burst for the coordinator."""
        return [one for peer, message in burst if (one := self._event(peer, message)) is not None]

    def mistakes(self, burst: Burst) -> list[UserError]:
        """Errors of prompts in the burst that can never run. Call before the burst is handled."""
        return [error for _, message in burst if (error := self._mistake(message)) is not None]

    def release_finished_trainer(self, burst: Burst) -> None:
        """Release a trainer that sent Goodbye after its last step. Call after the burst was handled."""
        for peer, message in burst:
            if isinstance(message, m.Goodbye) and self._roles.get(peer) == "trainer" and self._trainer.is_done():
                self._supervisor.release(peer)

    def _mistake(self, message: m.Message) -> UserError | None:
        """The error for a row that can never run, mostly because its prompt is too long, if the message rejects one."""
        if not isinstance(message, m.SampleReturned) or message.reason != "rejected":
            return None
        where = "data.eval" if self._out.is_eval(message.lease_id) else "data.train"
        remedy = "correct or remove the row, or set data.on_long_prompt: drop"
        return UserError(f"rejected: {message.detail}", where=where, remedy=remedy)

    def _event(self, peer: str, message: m.Message) -> InboundEvent | None:
        """The event of the message for the coordinator, if any; also updates measurements."""
        match message:
            case m.Hello():
                self._roles[peer] = message.role
                self._supervisor.reported(peer)
                self._monitor.received(peer)
                # A Hello read after its sender was permanently lost: leases to it would be lost without a notification.
                if message.role == "rollout" and self._admission is not None:
                    self._admission.arrived(peer, self._clock())
                if message.role == "rollout" and self._supervisor.watches(peer):
                    return InboundEvent(
                        WorkerJoined(
                            worker=peer, incarnation=message.incarnation, capacity=message.capacity,
                            is_external=self._supervisor.is_external(peer),
                        )
                    )  # fmt: skip
                return None
            case m.Goodbye():
                role = self._roles.pop(peer) if self._roles.get(peer) == "candidate" else self._roles.get(peer)
                if self._admission is not None:
                    self._admission.left(peer)
                if role != "rollout":
                    return None
                return self._worker_admin.goodbye(peer, message.reason)
            case _ if SPEAKERS.get(type(message)) != self._roles.get(peer):
                self._display.note(f"unexpected message {type(message).__name__} from {peer}", "warning")
                return None
            case m.JoinRequest() | m.JoinedWorkerEnded():
                if self._admission is not None:
                    self._admission.take(peer, message, self._clock())
                return None
            case m.Draining():
                return self._worker_admin.draining(peer, self._clock())
            case m.SampleFinished():
                self._losses.finished_sample(peer)
            case m.VersionLoaded():
                self._tracer.instant("version_loaded", lane=peer, version=message.version)
                self._journal.measure(
                    "swap", worker=peer, version=message.version, stage_s=message.stage_s, pause_s=message.pause_s
                )
            case m.MemoryReleased():
                self._tracer.instant("memory_released", lane=peer, num_bytes=message.num_bytes)
                self._journal.measure("release", worker=peer, num_bytes=message.num_bytes, seconds=message.seconds)
            case m.VersionPublished():
                self._tracer.instant("version_published", version=message.version)
                if message.note:
                    self._display.note(f"{peer}: {message.note}")
            case m.CheckpointSaved():
                self._trainer.saved_version = max(self._trainer.saved_version, message.version)
                self._worker_admin.checkpoint_saved(message.version, message.path)
                self._monitor.checkpoint_saved(message)
                self._watch.saved(message.version, Path(message.path))
            case m.CheckpointFailed():
                self._worker_admin.checkpoint_failed(message.reason)
                self._monitor.checkpoint_failed(message)
        return translate(peer, message, is_eval=self._out.is_eval)
