"""Starts, monitors and restarts the processes of a run within their restart limits, and reports losses.

Detects start, first message, silence and exit, and restarts with backoff. The consequences of a loss for samples are
decided by the coordinator; `Loss`es are returned for the server to report.

A process ends in one of five ways: as requested (not reported), by a user error (status 2: the run ends with its
message), by a failure within its restart limit (restarted), by a failure beyond it (permanent), or because it announced
that it drains (a rollout worker on a spot machine) and is allowed to: not restarted. Any other exit without a request
is also a failure, even with a Goodbye and status 0. An exit is evaluated LAST_WORDS_S after it was detected, so that
the last messages of the process are read first.

External workers (admission.py) have no process here. They are lost by silence or by a report of their candidate, and
are never restarted.

The trainer's ranks except the first have no connection to the controller: only their processes are monitored, and they
exit when rank 0 does. When one fails, ranks that only report its loss are evaluated after it, and all of them restart
together, counted as one restart, after `renew` has set their new address and all old ones have exited.

The start deadline of a process on a cluster begins when it has its placement (placement_waits.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_like.config import ProcessSpec
from areal_like.errors import OperationError, ProcessDied, UserError
from areal_like.process import DIVERGED, USER_MISTAKE, describe_status, last_error
from areal_like.transport.channel import Hub
from controller.launch.environments import child_environment
from controller.launch.launcher import Exit, Launcher, tail_of
from controller.runtime.placement_waits import PlaceWaits
from controller.telemetry.pulse import ProcessNow
from controller.wiring.process_specs import MODULES, Role

log = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 3.0, 10.0)
"""Wait before the first, second, ... restart of a process; the last value repeats."""
LAST_WORDS_S = 0.3
"""Delay between the exit of a process and its evaluation, for its last messages to arrive."""
LEAVE_S = 30.0
"""Time between the announcement of a process that it drains and its exit; then it is killed."""
SECONDARY_FAILURE = "RankLost"
"""Prefix of the last message of a rank that exited because another one did."""


@dataclass(frozen=True)
class Loss:
    """A lost process, temporarily or permanently."""

    name: str
    role: Role
    reason: str
    is_permanent: bool
    returncode: int | None = None
    may_return: bool = False
    """An external worker that may still be running and register again."""
    may_live: bool = False
    """It was killed, but its exit is not detected yet: it may still have memory. `Supervisor.take_ended` returns it
    later.
    """

    @property
    def is_divergence(self) -> bool:
        """Whether the cause is a diverged policy, not the process."""
        return self.returncode == DIVERGED


@dataclass
class SupervisedProcess:
    """One process under supervision."""

    spec: ProcessSpec
    spec_path: Path
    max_restarts: int
    restarts: int = 0
    started_s: float = field(init=False)
    start_due_s: float | None = None
    """Time of its next start; None: it runs, or will not be started."""
    has_reported: bool = field(init=False)
    """It sent Hello since its last start."""
    is_held: bool = False
    """It is not started before `renew` was called."""
    log_start: int = 0
    """Length of its log at its last start."""
    leaves_by_s: float | None = None
    """Deadline of its exit after it announced that it drains; None: it does not drain."""
    host: str = ""
    """Machine of an external worker; empty: the launcher starts the process."""


class Supervisor:
    """The processes of one run, by name."""

    def __init__(
        self, launcher: Launcher, hub: Hub, *, startup_timeout_s: float, silence_s: float, node_wait_s: float
    ) -> None:
        self._launcher, self._hub = launcher, hub
        self._startup_timeout_s, self._silence_s = startup_timeout_s, silence_s
        self._place_waits = PlaceWaits(node_wait_s)
        self._supervised: dict[str, SupervisedProcess] = {}
        self._exits: list[tuple[float, Exit]] = []
        """Exits by time of detection, not evaluated yet."""
        self._kill_reason: dict[str, str] = {}
        """Processes to kill, with the reason."""
        self._ended: list[str] = []
        """Processes whose exit was detected since the last call."""
        self._ended_elsewhere: list[tuple[float, str, str]] = []
        """Reported ends of external workers: time, name, reason."""
        self._externals: set[str] = set()
        """Names of all external workers so far, also of released ones."""
        self.restarts = 0

    def add(self, spec: ProcessSpec, spec_path: Path, max_restarts: int, now_s: float) -> None:
        """Add a process; `tick` starts it."""
        spec.save(spec_path)
        self._supervised[spec.name] = SupervisedProcess(spec, spec_path, max_restarts, start_due_s=now_s)

    def add_external(self, spec: ProcessSpec, host: str, now_s: float) -> None:
        """Monitor a rollout worker that was started by somebody else and has registered."""
        process = SupervisedProcess(spec, Path(), max_restarts=0, host=host)
        process.started_s, process.has_reported = now_s, True
        self._supervised[spec.name] = process
        self._externals.add(spec.name)

    def is_external(self, name: str) -> bool:
        """Return whether it is an external worker that is monitored now."""
        process = self._supervised.get(name)
        return process is not None and bool(process.host)

    def external_ended(self, name: str, reason: str, now_s: float) -> None:
        """Record the report that the process of an external worker has ended."""
        if self.is_external(name):
            self._ended_elsewhere.append((now_s, name, reason))

    def reported(self, name: str) -> None:
        """Record the Hello of a process."""
        if process := self._supervised.get(name):
            process.has_reported = True

    def release(self, name: str) -> None:
        """Release a process that has done its work, or was requested to exit: its exit is expected and it is not
        restarted.
        """
        self._place_waits.forget(name)
        process = self._supervised.pop(name, None)
        if process is not None and process.spec.num_ranks > 1 and process.spec.rank == 0:
            for follower in [other for other, one in self._supervised.items() if one.spec.rank]:
                self.release(follower)

    def leaving(self, name: str, now_s: float) -> None:
        """Record that the process announced that it drains: its exit is expected, and it is not restarted."""
        if (process := self._supervised.get(name)) and process.leaves_by_s is None:
            process.leaves_by_s = now_s + LEAVE_S

    def is_leaving(self, name: str) -> bool:
        """Return whether it announced that it drains, or has drained."""
        process = self._supervised.get(name)
        return process is None or process.leaves_by_s is not None

    def end(self, name: str, reason: str) -> None:
        """End a process that does not answer others: `tick` kills and restarts it, within its restart limit."""
        self._kill_reason[name] = reason

    def lost_touch(self, name: str, now_s: float) -> None:
        """Record that it cannot be reached: it must send Hello again within the start deadline, or counts as lost."""
        if process := self._supervised.get(name):
            process.has_reported, process.started_s = False, now_s

    @property
    def names(self) -> list[str]:
        """Supervised processes, and released ones that have not exited yet."""
        return [*self._supervised, *self._launcher.names]

    def watches(self, name: str) -> bool:
        """Return whether the process is supervised: it runs, or will be restarted."""
        return name in self._supervised

    def watches_role(self, role: Role) -> bool:
        """Return whether a process of this role is supervised."""
        return bool(self.names_of(role))

    def names_of(self, role: Role) -> list[str]:
        """Supervised processes of this role."""
        return [name for name, process in self._supervised.items() if process.spec.role == role]

    def is_running(self, name: str) -> bool:
        """Return whether the process is running; an external worker runs until it says Goodbye."""
        is_here = self._launcher.is_running(name)
        return is_here or (name not in self._launcher.names and name in self._hub.peers and name in self._externals)

    def living(self, role: Role) -> list[str]:
        """Processes of this role that have not exited yet, including killed ones."""
        return [name for name in self.names_of(role) if self._launcher.is_running(name)]

    def is_pool_unplaced(self) -> bool:
        """Return whether the trainer, or every rollout worker or reward service, waits for placements on the
        cluster.
        """
        waiting = set(self._place_waits.names)
        pools = [set(self.names_of(role)) for role in ("rollout", "reward")]
        return bool(waiting & set(self.names_of("trainer"))) or any(pool and pool <= waiting for pool in pools)

    def take_news(self) -> list[str]:
        """Messages about processes that wait for a placement, since the last call."""
        return self._place_waits.take_news()

    def take_ended(self) -> list[str]:
        """Processes that have exited for any reason since the last call, unless a new one has already registered.

        Their last messages were read before.
        """
        ended, self._ended = self._ended, []
        return [name for name in ended if name not in self._hub.peers]

    async def tick(self, now_s: float) -> list[Loss]:
        """Start processes that are due, and check for exits and silence.

        Raises UserError (reported by a process), OperationError (a process cannot be started).
        """
        self._exits += [(now_s, end) for end in self._launcher.reap()]
        due = [end for seen_s, end in self._exits if now_s - seen_s >= LAST_WORDS_S]
        self._exits = [(seen_s, end) for seen_s, end in self._exits if end not in due]
        self._ended += [end.name for end in due]
        due.sort(key=lambda end: last_error(self._tail(end.name)).startswith(SECONDARY_FAILURE))
        losses = [loss for end in due if (loss := self._on_exit(end, now_s)) is not None]
        losses.extend(self._on_silence(self._hub.silent(self._silence_s), now_s))
        losses.extend(self._end_condemned(now_s))
        losses.extend(self._end_external(now_s))
        if losses:  # reported before any successor can send Hello
            return losses
        is_old_group_here = any(self._lingers(name) for name in self.names_of("trainer"))
        for name, process in list(self._supervised.items()):
            is_due = process.start_due_s is not None and process.start_due_s <= now_s and not process.is_held
            if is_due and not (is_old_group_here if process.spec.role == "trainer" else self._lingers(name)):
                await self._start(process, now_s)
            elif process.leaves_by_s is not None and now_s > process.leaves_by_s and not self._has_ended(name):
                self._launcher.kill(name)
                losses.append(self._lose(process, f"did not exit within {LEAVE_S:g} s", now_s))
            elif process.start_due_s is None:
                losses.extend(self._on_the_way(process, now_s))
        return losses

    def _lingers(self, name: str) -> bool:
        return name in self._launcher.names or any(end.name == name for _, end in self._exits)

    async def _start(self, process: SupervisedProcess, now_s: float) -> None:
        process.start_due_s, process.started_s, process.has_reported = None, now_s, process.spec.rank > 0
        log_path = self._launcher.log_of(process.spec.name)
        process.log_start = log_path.stat().st_size if log_path.exists() else 0
        argv = ["-m", MODULES[process.spec.role], "--spec", str(process.spec_path)]
        pid = await self._launcher.start(
            process.spec.name, argv, child_environment(process.spec.num_threads, user_path=self._launcher.user_path)
        )
        log.info("started %s (process %s)", process.spec.name, pid or "id not known yet")

    def _on_exit(self, end: Exit, now_s: float) -> Loss | None:
        info = self._hub.peers.get(end.name)
        if info is not None and info.pid == end.pid:
            self._hub.forget(end.name)
        process = self._supervised.get(end.name)
        if process is None or end.expected or process.start_due_s is not None:
            return None
        tail = self._tail(end.name)
        if end.returncode == USER_MISTAKE:
            raise UserError(last_error(tail) or f"{end.name} could not start", where=end.name)
        reason = last_error(tail) or f"ended with {describe_status(end.returncode)}"
        return self._lose(process, reason, now_s, end.returncode)

    def _on_silence(self, names: Iterable[str], now_s: float) -> list[Loss]:
        losses = []
        for name in names:
            self._hub.forget(name)
            process = self._supervised.get(name)
            if process is not None and process.start_due_s is None and not self._has_ended(name):
                self._launcher.kill(name)
                losses.append(self._lose(process, f"silent for {self._silence_s:g} s", now_s))
        return losses

    def _end_condemned(self, now_s: float) -> list[Loss]:
        condemned, self._kill_reason = self._kill_reason, {}
        losses = []
        for name, reason in condemned.items():
            process = self._supervised.get(name)
            if process is not None and process.start_due_s is None and not self._has_ended(name):
                self._hub.forget(name)
                self._launcher.kill(name)
                losses.append(self._lose(process, reason, now_s))
        return losses

    def _end_external(self, now_s: float) -> list[Loss]:
        """Losses of external workers whose end was reported long enough ago for their last messages to be read."""
        due = [end for end in self._ended_elsewhere if now_s - end[0] >= LAST_WORDS_S]
        self._ended_elsewhere = [end for end in self._ended_elsewhere if end not in due]
        losses = []
        for _, name, reason in due:
            if self.is_external(name):
                self._hub.forget(name)
                losses.append(replace(self._lose(self._supervised[name], reason, now_s), may_return=False))
        return losses

    def _on_the_way(self, process: SupervisedProcess, now_s: float) -> list[Loss]:
        """Return whether it waits for its placement, or has one and has not registered yet."""
        name = process.spec.name
        awaited = self._launcher.awaits(name)
        if why := self._place_waits.look(name, awaited, now_s):
            self._launcher.kill(name)
            return [self._lose(process, why, now_s, is_hopeless=True)]
        if awaited:
            process.started_s = now_s
        return [] if process.has_reported else self._late_starter(process, now_s)

    def _late_starter(self, process: SupervisedProcess, now_s: float) -> list[Loss]:
        if now_s - process.started_s <= self._startup_timeout_s or self._has_ended(process.spec.name):
            return []
        self._launcher.kill(process.spec.name)
        return [self._lose(process, f"no heartbeat within {self._startup_timeout_s:g} s of its start", now_s)]

    def _has_ended(self, name: str) -> bool:
        """Return whether its exit was detected and is not evaluated yet."""
        return any(end.name == name and not end.expected for _, end in self._exits)

    def _lose(
        self,
        process: SupervisedProcess,
        reason: str,
        now_s: float,
        returncode: int | None = None,
        *,
        is_hopeless: bool = False,
    ) -> Loss:
        is_trainer = process.spec.role == "trainer"
        is_hopeless |= process.leaves_by_s is not None or (is_trainer and returncode == DIVERGED)
        is_permanent = is_hopeless or process.restarts >= process.max_restarts
        self._place_waits.forget(process.spec.name)
        if is_permanent:
            del self._supervised[process.spec.name]
        else:
            self.restarts += 1
            for one in [self._supervised[name] for name in self.names_of("trainer")] if is_trainer else [process]:
                self._launcher.kill(one.spec.name)
                self._place_waits.forget(one.spec.name)
                one.start_due_s = now_s + BACKOFF_S[min(one.restarts, len(BACKOFF_S) - 1)]
                one.is_held = is_trainer
                one.restarts += 1
        may_live = process.spec.name in self._launcher.names
        return Loss(
            process.spec.name, process.spec.role, reason, is_permanent, returncode,
            may_live=may_live, may_return=bool(process.host),
        )  # fmt: skip

    def renew(self, change: Callable[[ProcessSpec], ProcessSpec]) -> None:
        """Start the trainer's ranks, which wait for their restart, with the changed spec."""
        for process in self._supervised.values():
            if process.is_held:
                process.spec, process.is_held = change(process.spec), False
                process.spec.save(process.spec_path)

    def _tail(self, name: str) -> str:
        """The end of the process's log since its start."""
        process = self._supervised.get(name)
        return tail_of(self._launcher.log_of(name), start=process.log_start if process is not None else 0)

    def died(self, loss: Loss) -> OperationError:
        """The error that ends a run because of this loss: ProcessDied with the end of the process's own log, unless its
        last message is sufficient.
        """
        if loss.is_divergence:
            return OperationError(loss.reason)
        tail = tail_of(self._launcher.log_of(loss.name))
        return ProcessDied(loss.name, loss.returncode if loss.returncode is not None else -9, tail)

    def states(self) -> Mapping[str, str]:
        """Current state of each process, by name."""
        found = {}
        for name, process in self._supervised.items():
            info = self._hub.peers.get(name)
            if process.start_due_s is not None:
                found[name] = (
                    f"restarting ({process.restarts} of {process.max_restarts})" if process.restarts else "starting"
                )
            elif awaited := self._launcher.awaits(name):
                found[name] = f"waits for {awaited}"
            elif process.spec.rank:
                found[name] = "following"
            elif info is None or info.heartbeat is None:
                found[name] = "starting"
            else:
                found[name] = info.heartbeat.state
        return found

    def processes(self) -> dict[str, ProcessNow]:
        """All known facts of each process."""
        found = {}
        for name, state in self.states().items():
            info, host = self._hub.peers.get(name), self._supervised[name].host
            now = ProcessNow(
                self._supervised[name].spec.role,
                state,
                info.pid if host and info is not None else self._launcher.pid_of(name),
                rss_mb=self._launcher.rss_mb_of(name),
                host=host,
            )
            if info is not None and info.heartbeat is not None:
                now = replace(now, incarnation=info.incarnation, counters=dict(info.heartbeat.counters))
            found[name] = now
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far by process, including the controller; unknown ones are left out."""
        return self._launcher.cpu_seconds()

    def queue_seconds(self) -> dict[str, float]:
        """Seconds that threads of each process of this machine waited for a core; unknown ones are left out."""
        return self._launcher.queue_seconds()
