"""Keeps the processes of a run alive within their budgets, and says what happened to them.

Owns: start, first sign of life, silence, exit, restart with backoff. Refuses: what a loss means for samples (the
coordinator's): it returns `Loss`es for the server to report there.

A process ends in one of five ways: as requested (no news), by the user's mistake (status 2: the run ends with its
words), by an accident within its restart budget (started again), by an accident beyond it (permanent), or because it
announced that it leaves (a rollout worker on a spot machine) and may: not started again. Any other leaving without
having been asked is an accident too, even with a Goodbye and status 0. An exit is judged LAST_WORDS_S after it was
seen: what the process said just before is read first.

The trainer's ranks but the first have no line to the controller: they are known by their process alone and leave when
rank 0 does. When one dies, ranks that merely say that they lost it are judged after it, and all of them start again
together, within one budget, once `renew` has said from where and none of the old ones is left.

A process on its way to a cluster's node is not judged by the time of a start before it has its place
(placement_waits.py).
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
from controller.launch.launcher import Exit, Launcher, tail_of
from controller.launch.local import child_environment
from controller.runtime.placement_waits import PlaceWaits
from controller.telemetry.pulse import ProcessNow
from controller.wiring.process_specs import MODULES, Role

log = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 3.0, 10.0)
"""Wait before the first, second, ... restart of a process; the last value repeats."""
LAST_WORDS_S = 0.3
"""From the exit of a process to its judgement: its last messages are on their way."""
LEAVE_S = 30.0
"""From the announcement of a process that it leaves to its end; then it is killed."""
SECONDARY_FAILURE = "RankLost"
"""Begins the last words of a rank that ended because another one did."""


@dataclass(frozen=True)
class Loss:
    """A process that is gone (for now, or for good)."""

    name: str
    role: Role
    reason: str
    is_permanent: bool
    returncode: int | None = None
    may_live: bool = False
    """It was killed, and its end is not seen yet: it may still hold memory. `Supervisor.take_ended` names it then."""

    @property
    def is_divergence(self) -> bool:
        """Not the process is at fault, but the policy it was given."""
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
    """When to start it (again); None: it runs, or is not wanted."""
    has_reported: bool = field(init=False)
    """It said Hello since its last start."""
    is_held: bool = False
    """It is not started before `renew` has said how."""
    log_start: int = 0
    """Length of its log when it was started last."""
    leaves_by_s: float | None = None
    """It announced that it leaves, for good, and is gone by then; None: it stays."""


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
        """Seen at, not judged yet."""
        self._kill_reason: dict[str, str] = {}
        """Processes to end, with the reason."""
        self._ended: list[str] = []
        """Processes whose end was seen, since it was asked for last."""
        self.restarts = 0

    def add(self, spec: ProcessSpec, spec_path: Path, max_restarts: int, now_s: float) -> None:
        """Put a process under supervision; `tick` starts it."""
        spec.save(spec_path)
        self._supervised[spec.name] = SupervisedProcess(spec, spec_path, max_restarts, start_due_s=now_s)

    def reported(self, name: str) -> None:
        """The process said Hello."""
        if process := self._supervised.get(name):
            process.has_reported = True

    def release(self, name: str) -> None:
        """The process has done its work, or was asked to end: its exit is no surprise and it is not started again."""
        self._place_waits.forget(name)
        process = self._supervised.pop(name, None)
        if process is not None and process.spec.num_ranks > 1 and process.spec.rank == 0:
            for follower in [other for other, one in self._supervised.items() if one.spec.rank]:
                self.release(follower)

    def leaving(self, name: str, now_s: float) -> None:
        """The process announced that it leaves: its end is no accident, and it is not started again."""
        if (process := self._supervised.get(name)) and process.leaves_by_s is None:
            process.leaves_by_s = now_s + LEAVE_S

    def is_leaving(self, name: str) -> bool:
        """It announced that it leaves for good, or has left."""
        process = self._supervised.get(name)
        return process is None or process.leaves_by_s is not None

    def end(self, name: str, reason: str) -> None:
        """Others wait for this process in vain: `tick` kills it and starts it again, within its budget."""
        self._kill_reason[name] = reason

    def lost_touch(self, name: str, now_s: float) -> None:
        """It cannot be reached: it says Hello again within the time of a start, or counts as lost."""
        if process := self._supervised.get(name):
            process.has_reported, process.started_s = False, now_s

    @property
    def names(self) -> list[str]:
        """Processes under supervision, and those that have not ended yet."""
        return [*self._supervised, *self._launcher.names]

    def watches(self, name: str) -> bool:
        """The process is under supervision: it runs, or will be started again."""
        return name in self._supervised

    def watches_role(self, role: Role) -> bool:
        """Some process of this role is under supervision."""
        return bool(self.names_of(role))

    def names_of(self, role: Role) -> list[str]:
        """Processes of this role under supervision."""
        return [name for name, process in self._supervised.items() if process.spec.role == role]

    def is_running(self, name: str) -> bool:
        """The process lives."""
        return self._launcher.is_running(name)

    def living(self, role: Role) -> list[str]:
        """Those of this role whose process has not ended yet, also where it was killed."""
        return [name for name in self.names_of(role) if self._launcher.is_running(name)]

    def is_pool_unplaced(self) -> bool:
        """The trainer, or every rollout worker or reward service, waits for places on the cluster."""
        waiting = set(self._place_waits.names)
        pools = [set(self.names_of(role)) for role in ("rollout", "reward")]
        return bool(waiting & set(self.names_of("trainer"))) or any(pool and pool <= waiting for pool in pools)

    def take_news(self) -> list[str]:
        """Words on processes that wait for a place, since the last call."""
        return self._place_waits.take_news()

    def take_ended(self) -> list[str]:
        """Processes that are gone, whatever the reason, since the last call; not where a new one has reported already.

        What they said last was read before.
        """
        ended, self._ended = self._ended, []
        return [name for name in ended if name not in self._hub.peers]

    async def tick(self, now_s: float) -> list[Loss]:
        """Start what is due, and look at who ended or fell silent.

        Raises UserError (a process says the user must change something), OperationError (it cannot be started).
        """
        self._exits += [(now_s, end) for end in self._launcher.reap()]
        due = [end for seen_s, end in self._exits if now_s - seen_s >= LAST_WORDS_S]
        self._exits = [(seen_s, end) for seen_s, end in self._exits if end not in due]
        self._ended += [end.name for end in due]
        due.sort(key=lambda end: last_error(self._tail(end.name)).startswith(SECONDARY_FAILURE))
        losses = [loss for end in due if (loss := self._on_exit(end, now_s)) is not None]
        losses.extend(self._on_silence(self._hub.silent(self._silence_s), now_s))
        losses.extend(self._end_condemned(now_s))
        if losses:  # they are reported before any successor can say Hello
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
        log.info("started %s (process %s)", process.spec.name, pid or "on its way to its node")

    def _on_exit(self, end: Exit, now_s: float) -> Loss | None:
        info = self._hub.peers.get(end.name)
        if info is not None and info.pid == end.pid:
            self._hub.forget(end.name)
        process = self._supervised.get(end.name)
        if process is None or end.expected or process.start_due_s is not None:
            return None
        tail = self._tail(end.name)
        if end.returncode == USER_MISTAKE:
            raise UserError(last_error(tail) or f"{end.name} refused to start", where=end.name)
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

    def _on_the_way(self, process: SupervisedProcess, now_s: float) -> list[Loss]:
        """It waits for its place, or it has one and is to report."""
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
        """Its exit was seen and is judged in a moment."""
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
        return Loss(process.spec.name, process.spec.role, reason, is_permanent, returncode, may_live)

    def renew(self, change: Callable[[ProcessSpec], ProcessSpec]) -> None:
        """The trainer's ranks, which wait to be started again, start with the changed spec."""
        for process in self._supervised.values():
            if process.is_held:
                process.spec, process.is_held = change(process.spec), False
                process.spec.save(process.spec_path)

    def _tail(self, name: str) -> str:
        """The end of what the process wrote since it was started."""
        process = self._supervised.get(name)
        return tail_of(self._launcher.log_of(name), start=process.log_start if process is not None else 0)

    def died(self, loss: Loss) -> OperationError:
        """The error that ends a run because of this loss: ProcessDied with the end of the process's own log, unless its
        last words say it all.
        """
        if loss.is_divergence:
            return OperationError(loss.reason)
        tail = tail_of(self._launcher.log_of(loss.name))
        return ProcessDied(loss.name, loss.returncode if loss.returncode is not None else -9, tail)

    def states(self) -> Mapping[str, str]:
        """What each process does now, by name."""
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
        """The same with all that is known of each process."""
        found = {}
        for name, state in self.states().items():
            now = ProcessNow(
                self._supervised[name].spec.role,
                state,
                self._launcher.pid_of(name),
                rss_mb=self._launcher.rss_mb_of(name),
            )
            info = self._hub.peers.get(name)
            if info is not None and info.heartbeat is not None:
                now = replace(now, incarnation=info.incarnation, counters=dict(info.heartbeat.counters))
            found[name] = now
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far by process, the controller's own included; those it is not known of are left out."""
        return self._launcher.cpu_seconds()
