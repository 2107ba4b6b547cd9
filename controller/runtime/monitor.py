"""Reports a running job to display, status.json and metrics.jsonl, each at its own interval.

Collects the current state, pulses and process events. The layout is in telemetry/display.py, files in status.py and
journal.py, totals in summary.py.

After a resume, step and accuracy are those of the whole run; elapsed and remaining time those of this session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from areal_like.wire.messages import CheckpointFailed, CheckpointSaved
from controller.doctor.machine import Machine
from controller.doctor.topics.processor import usable_cores
from controller.launch.processor import machine_busy_s
from controller.runtime.client_waits import client_waits
from controller.runtime.components import RunComponents
from controller.runtime.supervisor import Loss
from controller.telemetry.display import Snapshot
from controller.telemetry.progress import EvaluationBars
from controller.telemetry.pulse import interval_s
from controller.telemetry.step_reporter import StepReporter


class Monitor:
    """Call `tick` often, and `last` once, before the processes are requested to exit."""

    def __init__(
        self, components: RunComponents, *, steps: StepReporter, clock: Callable[[], float],
        client_addresses: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        telemetry = components.telemetry
        self._coordinator, self._supervisor, self._hub = components.coordinator, components.supervisor, components.hub
        self._tally, self._steps, self._display = telemetry.tally, steps, telemetry.display
        self._journal, self._status, self._sinks = telemetry.journal, telemetry.status, telemetry.sinks
        self._clock, self._started_s = clock, clock()
        self._client_addresses = client_addresses or {}
        self._next_pulse_s = self._started_s
        self._evaluations = EvaluationBars()
        self._is_resumed = telemetry.tally.is_resumed
        self._cores = usable_cores(Machine())
        self._lost: set[str] = set()
        self._reported: set[str] = set()
        """Sinks whose failure was displayed."""

    def tick(self) -> None:
        """Process the newest heartbeats; update display and files that are due."""
        now_s = self._clock()
        for name, info in self._hub.peers.items():
            if info.heartbeat is not None and info.role != "candidate":
                self._tally.add_counters(name, info.incarnation, info.heartbeat.counters)
        waits, counts = self._waits(), self._counts()
        progress = [self._steps.progress(), *self._evaluations.progress(self._coordinator.evaluations(), now_s)]
        self._display.show(
            Snapshot(
                version=self._coordinator.version,
                waits=waits,
                states=self._supervisor.states(),
                counts=counts,
                elapsed_s=now_s - self._started_s,
                progress=progress,
                is_resumed=self._is_resumed,
            )
        )
        self._look_at_sinks()
        is_pulse_due, is_status_due = now_s >= self._next_pulse_s, self._status.is_due()
        if not is_pulse_due and not is_status_due:
            return
        processes = self._processes()
        if is_status_due:
            self._stand(waits, counts, processes)
        if is_pulse_due:
            self._pulse(waits, counts, processes)

    def last(self) -> None:
        """Write the current state to all files, at the end of the run."""
        waits, counts, processes = self._waits(), self._counts(), self._processes()
        self._stand(waits, counts, processes)
        self._pulse(waits, counts, processes)

    def lost(self, loss: Loss) -> None:
        """Record a lost process, temporarily or permanently."""
        self._lost.add(loss.name)
        event = "gone" if loss.is_permanent else "lost"
        self._journal.measure("process", name=loss.name, event=event, reason=loss.reason)

    def received(self, name: str) -> None:
        """Record a Hello of a process: a lost one is back."""
        if name in self._lost:
            self._lost.discard(name)
            self._journal.measure("process", name=name, event="restarted", reason="")

    def checkpoint_saved(self, message: CheckpointSaved) -> None:
        """Record a checkpoint on disk; repeated reports are ignored."""
        if message.num_bytes:
            self._journal.measure(
                "checkpoint", version=message.version, path=message.path, stall_s=message.stall_s,
                write_s=message.write_s, num_bytes=message.num_bytes,
            )  # fmt: skip

    def checkpoint_failed(self, message: CheckpointFailed) -> None:
        """Record that a checkpoint could not be written; the run continues."""
        self._journal.measure("checkpoint_failed", version=message.version, reason=message.reason)
        text = (
            f"the checkpoint of version {message.version} could not be written: {message.reason}; the run continues "
            "without it"
        )
        self._display.note(text, "warning")

    # ------------------------------------------------------------ inside

    def _waits(self) -> list[str]:
        return [*self._coordinator.waits(), *client_waits(self._supervisor.states(), self._client_addresses)]

    def _counts(self) -> dict[str, int]:
        counts = self._coordinator.counts()
        return {
            "drawn": counts.drawn, "consumed": counts.consumed, "filtered": counts.filtered,
            "dropped": sum(counts.dropped.values()), "running": counts.running, "ready": counts.ready,
        }  # fmt: skip

    def _processes(self) -> dict[str, Any]:
        return {name: process.row() for name, process in self._supervisor.processes().items()}

    def _stand(self, waits: list[str], counts: dict[str, int], processes: dict[str, Any]) -> None:
        """Write the current state to status.json and to sinks that show it."""
        step, version = self._tally.steps, self._coordinator.version
        self._status.write(
            "running", step=step, version=version, eta_s=self._steps.eta_s(), waits=waits, counts=counts,
            processes=processes, last_step=self._journal.last_step,
            accuracy={str(version): value for version, value in sorted(self._tally.accuracy.items())},
        )  # fmt: skip
        now = {"kind": "now", "step": step, "version": version, "counts": counts, "processes": processes}
        self._sinks.offer(now)

    def _look_at_sinks(self) -> None:
        for row in self._sinks.take_rows():
            self._journal.append(row)
        for news in self._sinks.news():
            self._journal.measure("sink", **news.facts())
            if news.sink not in self._reported:
                self._reported.add(news.sink)
                text = f"metrics sink {news.sink} is down ({news.error}); the run continues and counts the lost rows"
                self._display.note(text, "warning")

    def _pulse(self, waits: list[str], counts: dict[str, int], processes: dict[str, Any]) -> None:
        now_s = self._clock()
        self._next_pulse_s = now_s + interval_s(now_s - self._started_s, len(processes))
        self._journal.measure(
            "pulse", wall_s=round(self._steps.wall_s(), 3), version=self._coordinator.version, waits=waits,
            counts=counts, processes=processes, processor=self._processor(),
        )  # fmt: skip

    def _processor(self) -> dict[str, Any]:
        """Cores that the run may use on this machine, processor time of each process and its waits for a core, and the
        use of the machine by all processes, including those of other programs.
        """
        return {
            "cores": self._cores,
            "cpu_s": _rounded(self._supervisor.cpu_seconds()),
            "queue_s": _rounded(self._supervisor.queue_seconds()),
            "machine": {"cores": os.cpu_count() or 1, "busy_s": round(machine_busy_s(), 2)},
        }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in sorted(seconds.items())}
