"""A complete run under a virtual clock: simulated workers, trainer, network and crashes around the real coordinator.

Contains the actions of a schedule, faults included, and the checks after every event. schedules.py or hypothesis
chooses the schedule. Tokens are represented by their versions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ledger_model import LedgerModel

from areal_like.wire.messages import ReturnReason
from controller.coordinator import rewriting
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import (
    Effect,
    EndRun,
    EndWorker,
    EvalDone,
    EvalDropped,
    LeaseOrder,
    Note,
    PurgePayloads,
    SendAck,
    SendBatch,
    SendCancel,
    SendLeases,
    SendNoMoreBatches,
    SendRecall,
    SendRelease,
    SendRewrite,
    SendSwap,
    SendVersion,
    StoreFinished,
    StorePartial,
)
from controller.coordinator.events import (
    BatchRequested,
    CheckpointTaken,
    Event,
    LeaseReturned,
    PartialReport,
    ProgressReported,
    Published,
    RunStarted,
    SampleReported,
    Tick,
    TrainerRestarted,
    VersionRewritten,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
    WorkerSpeed,
    WorkerVersionFailed,
    WorkerVersionLoaded,
    WorkerVersionStaged,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchGroup, LedgerState


@dataclass
class Task:
    order: LeaseOrder
    versions: list[int]
    length: int
    num_reported: int

    @property
    def is_train(self) -> bool:
        return self.order.purpose == "train"


@dataclass
class VirtualWorker:
    name: str
    incarnation: int = 0
    capacity: int = 4
    version: int = -1
    announced: int = -1
    lineage: str = ""
    """Of the announced version."""
    is_alive: bool = True
    is_known: bool = False
    """The controller counts it as present."""
    speed: int = 1
    """Tokens it makes where a slow one makes one."""
    is_leaving: bool = False
    """It has announced that it drains."""
    is_away: bool = False
    """It has left for good: only an operator starts it again."""
    is_external: bool = False
    """It joined from outside: nobody starts it again, and it may leave at any time."""
    recalled: set[int] = field(default_factory=set)
    """Leases asked back, not looked at yet."""
    place: str = ""
    """Manifest of the announced version."""
    is_held: bool = False
    """It waits for its turn once it has staged what was announced."""
    has_staged: bool = False
    may_swap: bool = False
    """It has the turn."""
    has_memory: bool = False
    """A version was announced, and its memory was not released since."""
    is_release_due: bool = False
    release_number: int = 0
    tasks: dict[int, Task] = field(default_factory=dict)
    unacked: dict[int, tuple[SampleReported, list[int]]] = field(default_factory=dict)


@dataclass
class VirtualTrainer:
    version: int = -1
    is_alive: bool = True
    steps: dict[int, tuple[BatchGroup, ...]] = field(default_factory=dict)
    """What it trained on, along the lineage that leads to its version."""
    batches: dict[int, SendBatch] = field(default_factory=dict)
    asked: int | None = None
    last_step: int | None = None
    is_done: bool = False
    rewrites: list[SendRewrite] = field(default_factory=list)
    """Asked for and not done yet."""


Letter = tuple[str, Event, dict[int, list[int]]]
"""Sender, event, and the tokens' versions of each lease in it."""


def _lease_of(effect: Effect) -> int:
    """The lease whose tokens an effect stores; -1 where it stores none."""
    match effect:
        case StorePartial():
            return effect.lease_id
        case StoreFinished():
            return effect.outcome.lease_id
    return -1


class VirtualCluster:
    """One run. `rng` decides lengths, verdicts and which of several things an action hits."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        rng: random.Random,
        *,
        num_workers: int = 2,
        capacity: int = 4,
        segment_tokens: int = 0,
        failure_rate: float = 0.1,
        equal_rate: float = 0.3,
        checkpoint_every: int = 2,
        mirror: Callable[[list[tuple[Effect, list[int] | None]]], None] | None = None,
    ) -> None:
        self.settings, self.rng = settings, rng
        self.segment_tokens, self.failure_rate, self.equal_rate = segment_tokens, failure_rate, equal_rate
        self.checkpoint_every = checkpoint_every
        self.mirror = mirror
        self.ledger = LedgerModel(
            settings.groups_per_step, settings.group_size, settings.bound, settings.on_stale, settings.least_groups,
            settings.replay,
        )  # fmt: skip
        self.coordinator = Coordinator(settings)
        self.workers = {f"rollout-{i}": VirtualWorker(f"rollout-{i}", capacity=capacity) for i in range(num_workers)}
        self.trainer = VirtualTrainer()
        self.letters: list[Letter] = []
        self.now_s = 0.0
        self.end: EndRun | None = None
        self.evals: list[EvalDone | EvalDropped] = []
        self.num_events = 0
        self.lineage = "l0"
        self.joined: dict[str, str] = {}
        """Incarnation by worker, as the controller knows it."""
        self.leaving: set[str] = set()
        """Workers that may leave for good."""
        self.orders: dict[int, LeaseOrder] = {}
        self.damaged: set[str] = set()
        """Manifests of versions whose files are damaged."""
        self.num_damages: Counter[int] = Counter()
        """By version of the present lineage."""
        self.num_rewrites = 0
        self.num_migrated = self.num_refused = self.num_trainer_deaths = 0
        for worker in self.workers.values():
            worker.speed = rng.choice([1, 1, 4])
        self.handle(RunStarted(lineage="l0"))
        self.post("trainer", Published(version=0, lineage="l0", manifest_path="l0-v0"))
        self.trainer.version = 0
        for worker in self.workers.values():
            self.hello(worker)

    # ------------------------------------------------------------ network

    def post(self, sender: str, event: Event, tokens: dict[int, list[int]] | None = None) -> None:
        self.letters.append((sender, event, tokens or {}))

    def hello(self, worker: VirtualWorker) -> None:
        worker.is_known = True
        self.post(
            worker.name,
            WorkerJoined(
                worker=worker.name, incarnation=str(worker.incarnation), capacity=worker.capacity,
                is_external=worker.is_external,
            ),
        )  # fmt: skip

    def deliver(self) -> None:
        """One letter arrives: the first of a random sender, or out of order if it is a finished sample."""
        if not self.letters:
            return
        index = self.rng.randrange(len(self.letters))
        sender, event, _ = self.letters[index]
        if not isinstance(event, SampleReported):
            index = next(i for i, letter in enumerate(self.letters) if letter[0] == sender)
        sender, event, tokens = self.letters.pop(index)
        self.handle(event, tokens)

    def deliver_burst(self) -> None:
        """Several letters are handled before anything is committed or sent, as the shell does under load."""
        burst, self.letters = self.letters[:8], self.letters[8:]
        self.handle_burst([(event, tokens) for _, event, tokens in burst])

    def deliver_all(self) -> None:
        while self.letters:
            _, event, tokens = self.letters.pop(0)
            self.handle(event, tokens)

    def duplicate(self) -> None:
        """A report arrives twice."""
        doubles = [x for x in self.letters if isinstance(x[1], SampleReported | ProgressReported)]
        if doubles:
            self.letters.append(self.rng.choice(doubles))

    # ------------------------------------------------------------ controller

    def handle(
        self,
        event: Event,
        tokens: dict[int, list[int]] | None = None,
        *,
        is_committed: bool = True,
        is_sent: bool = True,
    ) -> None:
        self.handle_burst([(event, tokens or {})], is_committed=is_committed, is_sent=is_sent)

    def handle_burst(
        self,
        burst: list[tuple[Event, dict[int, list[int]]]],
        *,
        is_committed: bool = True,
        is_sent: bool = True,
    ) -> None:
        """What the shell does: all events, then one transaction, then everything else."""
        entries: list[tuple[Effect, list[int] | None]] = []
        others: list[Effect] = []
        owed: list[PartialReport] = []
        for event, tokens in burst:
            self.num_events += 1
            self._watch(event)
            is_owed = isinstance(event, LeaseReturned) and self.coordinator.is_live(event.part.lease_id)
            effects = self.coordinator.handle(event, self.now_s)
            if is_owed:
                owed.append(event.part)
            num_others = len(others)
            for effect in effects:
                if effect.is_ledger:
                    assert len(others) == num_others, "ledger effects come first"
                    entries.append((effect, tokens.get(_lease_of(effect))))
                else:
                    others.append(effect)
        if not is_committed:
            return
        for effect, versions in entries:
            self.ledger.apply(effect, versions)
        if self.mirror is not None and entries:
            self.mirror(entries)
        self._check_returned(owed)
        self.ledger.check_counts(self.coordinator.counts())
        if entries:
            self.ledger.check_invariant()
        if is_sent:
            for effect in others:
                self._carry_out(effect)

    def _watch(self, event: Event) -> None:
        """What the shell does when a worker comes, announces that it leaves, or goes."""
        match event:
            case WorkerJoined():
                self.joined[event.worker] = event.incarnation
            case WorkerDraining():
                is_current = event.incarnation == self.joined.get(event.worker)
                is_external = self.workers[event.worker].is_external
                if is_current and (is_external or self.coordinator.can_spare({event.worker, *self.leaving})):
                    self.leaving.add(event.worker)

    def _check_returned(self, owed: list[PartialReport]) -> None:
        """`exact-interruption`: what a worker hands back with a live lease is in the ledger, to the last token."""
        for part in owed:
            order = self.orders[part.lease_id]
            group = self.ledger.groups.get(order.group_id)
            if order.purpose == "train" and group is not None and group.fate == "live" and part.num_tokens:
                facts = group.samples.get(order.sample_index)
                assert facts is not None, "exact-interruption: tokens of a returned lease were lost"
                is_there = facts.is_finished or len(facts.partial) >= part.start + part.num_tokens
                assert is_there, "exact-interruption: tokens of a returned lease were lost"

    def _carry_out(self, effect: Effect) -> None:
        name = getattr(effect, "worker", None)
        worker = self.workers.get(name or "")
        if worker is not None and (not worker.is_alive or self.joined.get(worker.name) != str(worker.incarnation)):
            return  # meant for a process that is dead
        match effect:
            case SendLeases():
                self._take_leases(self.workers[effect.worker], effect)
            case SendAck():
                for lease_id in effect.lease_ids:
                    self.workers[effect.worker].unacked.pop(lease_id, None)
            case SendCancel():
                for lease_id in effect.lease_ids:
                    self.workers[effect.worker].tasks.pop(lease_id, None)
                    self.workers[effect.worker].unacked.pop(lease_id, None)
            case SendRecall():
                self.workers[effect.worker].recalled |= set(effect.lease_ids)
            case SendVersion():
                worker = self.workers[effect.worker]
                assert effect.version >= worker.version, "a worker was sent an older version"
                assert effect.manifest_path, "a version was announced that is not available"
                worker.announced, worker.lineage = max(worker.announced, effect.version), effect.lineage
                worker.place = effect.manifest_path
                worker.is_held, worker.has_staged, worker.may_swap = effect.is_held, False, False
                worker.has_memory = True
                self._check_memory()
            case SendSwap():
                self._take_turn(self.workers[effect.worker], effect)
            case SendRelease():
                worker = self.workers[effect.worker]
                worker.is_release_due, worker.release_number = True, effect.number
            case EndWorker():
                self._die(self.workers[effect.worker], effect.reason, is_permanent=False)
            case SendBatch():
                if not self.trainer.is_alive or effect.lineage != self.lineage:
                    return  # meant for a process that is dead
                if self.trainer.last_step is None or effect.step <= self.trainer.last_step:
                    self.trainer.batches[effect.step] = effect
                self.trainer.asked = None
                self._check_memory()
            case SendRewrite():
                if self.trainer.is_alive and effect.lineage == self.lineage:
                    self.trainer.rewrites.append(effect)
            case SendNoMoreBatches():
                if not self.trainer.is_alive:
                    return
                self.trainer.last_step = effect.last_step
                self.trainer.asked = None
            case EvalDone() | EvalDropped():
                self.evals.append(effect)
            case EndRun():
                assert self.end is None
                self.end = effect
            case Note() | PurgePayloads():
                pass

    def _check_memory(self) -> None:
        """Devices that are shared are the trainer's or the engines', never both's."""
        holders = [worker.name for worker in self.workers.values() if worker.is_alive and worker.has_memory]
        is_shared = self.settings.is_colocated
        assert not (is_shared and holders and self.trainer.batches), f"{holders} and the trainer hold memory"

    def _prefix_of(self, order: LeaseOrder) -> list[int]:
        """Versions of the tokens that a leased sample already has; checks the lease against the ledger."""
        prefix: list[int] = []
        if order.purpose == "train":
            group = self.ledger._live(order.group_id)
            facts = group.samples.get(order.sample_index)
            prefix = list(facts.partial) if facts else []
            assert facts is None or not facts.is_finished, "a finished sample was leased"
            assert order.min_version >= max([group.version, *prefix[-1:]])
        assert len(prefix) == order.prefix_tokens, "exact-interruption: reported tokens were lost"
        return prefix

    def _take_leases(self, worker: VirtualWorker, effect: SendLeases) -> None:
        for order in effect.leases:
            if not self.coordinator.is_live(order.lease_id):
                continue
            assert order.lease_id not in worker.tasks
            self.orders[order.lease_id] = order
            if worker.is_leaving:
                self.num_refused += 1
                assert self.num_refused < 1000, f"{worker.name} leaves, and is leased to again and again"
                part = PartialReport(lease_id=order.lease_id, start=order.prefix_tokens, num_tokens=0)
                self.post(worker.name, LeaseReturned(worker=worker.name, part=part, reason="drain"), {})
                continue
            self._check_alone(worker, order)
            self.num_migrated += bool(order.moved_from)
            prefix = self._prefix_of(order)
            length = max(len(prefix), 1 + int(min(self.rng.expovariate(self.rng.choice([0.1, 0.5])), 30)))
            worker.tasks[order.lease_id] = Task(order, prefix, length, len(prefix))
        assert len(worker.tasks) + len(worker.unacked) <= worker.capacity, "credits were exceeded"

    def _check_alone(self, worker: VirtualWorker, order: LeaseOrder) -> None:
        """Nobody else works on the same sample under a lease that still counts (that of a lost worker is void)."""
        sample = (order.group_id, order.sample_index)
        for other in self.workers.values():
            for lease_id, task in other.tasks.items():
                is_other = lease_id != order.lease_id and task.is_train and self.coordinator.is_live(lease_id)
                is_same = (task.order.group_id, task.order.sample_index) == sample and order.purpose == "train"
                assert not (is_other and is_same), (
                    f"exact-interruption: a sample is on two workers, {other.name} and {worker.name}"
                )

    # ------------------------------------------------------------ workers

    def _alive(self) -> VirtualWorker | None:
        alive = [worker for worker in self.workers.values() if worker.is_alive]
        return self.rng.choice(alive) if alive else None

    def generate(self) -> None:
        """Some tokens on one worker; finished samples are scored and reported."""
        if (worker := self._alive()) is not None:
            self._generate(worker, self.rng.choice([1, 2, 4, 16]))

    def _generate(self, worker: VirtualWorker, num_tokens: int) -> None:
        for lease_id, task in list(worker.tasks.items()):
            if worker.version < task.order.min_version:
                continue
            fresh = min(num_tokens * worker.speed, task.length - len(task.versions))
            task.versions.extend([worker.version] * fresh)
            if len(task.versions) >= task.length:
                if task.versions:
                    self._finish(worker, lease_id, task)
            elif (
                task.order.purpose == "train"
                and 0 < self.segment_tokens <= len(task.versions) - task.order.prefix_tokens
            ):
                self._give_back(worker, lease_id, task, "segment")

    def _finish(self, worker: VirtualWorker, lease_id: int, task: Task) -> None:
        del worker.tasks[lease_id]
        is_scored = self.rng.random() >= self.failure_rate
        kind = "scored" if is_scored else self.rng.choice(["timed_out", "crashed", "invalid"])
        value = None
        if is_scored:
            value = 1.0 if self.rng.random() < self.equal_rate else self.rng.random()
        outcome = SampleOutcome(
            lease_id=lease_id,
            group_id=task.order.group_id,
            sample_index=task.order.sample_index,
            num_tokens=len(task.versions),
            first_version=task.versions[0],
            last_version=task.versions[-1],
            verdict_kind=kind,
            value=value,
        )
        event = SampleReported(worker=worker.name, outcome=outcome)
        worker.unacked[lease_id] = (event, list(task.versions))
        self.post(worker.name, event, {lease_id: list(task.versions)})

    def _part(self, lease_id: int, task: Task) -> tuple[PartialReport, list[int]]:
        fresh = task.versions[task.num_reported :]
        part = PartialReport(
            lease_id=lease_id,
            start=task.num_reported,
            num_tokens=len(fresh),
            first_version=fresh[0] if fresh else -1,
            last_version=fresh[-1] if fresh else -1,
        )
        task.num_reported = len(task.versions)
        return part, fresh

    def report_progress(self) -> None:
        if (worker := self._alive()) is not None:
            self._report(worker)

    def _report(self, worker: VirtualWorker) -> None:
        parts = {i: self._part(i, task) for i, task in worker.tasks.items() if len(task.versions) > task.num_reported}
        if parts:
            items = tuple(part for part, _ in parts.values())
            self.post(
                worker.name, ProgressReported(worker=worker.name, items=items), {i: f for i, (_, f) in parts.items()}
            )

    def _give_back(
        self, worker: VirtualWorker, lease_id: int, task: Task, reason: ReturnReason, detail: str = ""
    ) -> None:
        part, fresh = self._part(lease_id, task)
        del worker.tasks[lease_id]
        self.post(
            worker.name, LeaseReturned(worker=worker.name, part=part, reason=reason, detail=detail), {lease_id: fresh}
        )

    def answer_recalls(self) -> None:
        if (worker := self._alive()) is not None:
            self._answer_recalls(worker)

    def _answer_recalls(self, worker: VirtualWorker) -> None:
        """Recalled leases go back, except one that is kept now and then: it is nearly done."""
        for lease_id in sorted(worker.recalled):
            if lease_id in worker.tasks and self.rng.random() < 0.9:
                self._give_back(worker, lease_id, worker.tasks[lease_id], "migrated")
        worker.recalled.clear()

    def tell_speed(self) -> None:
        if (worker := self._alive()) is not None:
            self._tell_speed(worker)

    def _tell_speed(self, worker: VirtualWorker) -> None:
        speed = worker.speed * self.rng.uniform(0.8, 1.2)
        self.post(worker.name, WorkerSpeed(worker=worker.name, tokens_per_s=speed))

    def drain_worker(self) -> None:
        """Notice: it announces that it leaves, and hands everything back."""
        if (worker := self._alive()) is not None:
            self._drain(worker)

    def _drain(self, worker: VirtualWorker) -> None:
        if not worker.is_leaving:
            worker.is_leaving = True
            draining = WorkerDraining(worker=worker.name, incarnation=str(worker.incarnation))
            self.post(worker.name, draining)
            for lease_id, task in list(worker.tasks.items()):
                self._give_back(worker, lease_id, task, "drain")

    def leave(self) -> None:
        for worker in self.workers.values():
            self._leave(worker)

    def _leave(self, worker: VirtualWorker) -> None:
        """Goodbye, once its finished samples are acknowledged and its messages were received."""
        if worker.is_leaving and worker.is_alive and not worker.unacked and not self._speaks(worker):
            worker.is_away = worker.name in self.leaving
            self.leaving.discard(worker.name)
            self._die(worker, "drained", is_permanent=worker.is_away)

    def _speaks(self, worker: VirtualWorker) -> bool:
        return any(sender == worker.name for sender, _, _ in self.letters)

    def drain_one(self) -> None:
        """A worker returns one sample normally."""
        worker = self._alive()
        if worker is not None and worker.tasks:
            lease_id = self.rng.choice(list(worker.tasks))
            self._give_back(worker, lease_id, worker.tasks[lease_id], "drain")

    def reject_one(self) -> None:
        """A prompt turns out to be too long."""
        worker = self._alive()
        if worker is not None and worker.tasks:
            lease_id = self.rng.choice(list(worker.tasks))
            self._give_back(worker, lease_id, worker.tasks[lease_id], "rejected", "too long")

    def load_version(self) -> None:
        if (worker := self._alive()) is not None:
            self._load(worker)

    def _load(self, worker: VirtualWorker) -> None:
        if worker.announced > worker.version and worker.place in self.damaged:
            event = WorkerVersionFailed(
                worker=worker.name, version=worker.announced, lineage=worker.lineage, reason="damaged", is_damaged=True
            )
            worker.announced = worker.version
            self.post(worker.name, event)
        elif worker.announced > worker.version and worker.is_held and not worker.may_swap:
            if not worker.has_staged:
                worker.has_staged = True
                staged = WorkerVersionStaged(worker=worker.name, version=worker.announced, lineage=worker.lineage)
                self.post(worker.name, staged)
        elif worker.announced > worker.version:
            worker.version = worker.announced
            worker.is_held = worker.may_swap = False
            self.post(
                worker.name,
                WorkerVersionLoaded(worker=worker.name, version=worker.version, lineage=worker.lineage),
            )

    def _take_turn(self, worker: VirtualWorker, effect: SendSwap) -> None:
        """`swap: rolling`: a worker gets the turn when no other that can be reached has it."""
        known = self.coordinator._state.workers
        holders = [
            other.name
            for other in self.workers.values()
            if other is not worker and other.is_alive and other.may_swap and other.version < other.announced
            if known[other.name].is_present and not known[other.name].is_draining
            if not known[other.name].weights.quarantine
        ]  # fmt: skip
        assert not holders, f"{worker.name} gets the turn while {holders} swap"
        if effect.version == worker.announced:
            worker.may_swap = True

    def release(self) -> None:
        if (worker := self._alive()) is not None:
            self._release(worker)

    def _release(self, worker: VirtualWorker) -> None:
        """Gives its memory back: nothing may be running there."""
        if worker.is_release_due:
            assert not worker.tasks, "memory was asked for while answers run"
            worker.is_release_due = worker.has_memory = False
            worker.version = worker.announced = -1
            self.post(worker.name, WorkerReleased(worker=worker.name, number=worker.release_number, num_bytes=1))

    def damage_version(self) -> None:
        """The newest version's files are damaged, as often as can be repaired."""
        trainer = self.trainer
        if trainer.version >= 0 and self.num_damages[trainer.version] < rewriting.MAX_REWRITES - 1:
            self.num_damages[trainer.version] += 1
            self.damaged.add(self._place())

    def _place(self) -> str:
        return f"{self.lineage}-v{self.trainer.version}"

    def write_again(self) -> None:
        """The trainer writes the version again: it can write only the version that it is at."""
        trainer = self.trainer
        if not trainer.is_alive or not trainer.rewrites:
            return
        wanted = trainer.rewrites.pop(0)
        is_newest = wanted.version == trainer.version
        if is_newest:
            self.damaged.discard(self._place())
            self.num_rewrites += 1
        answer = VersionRewritten(
            version=wanted.version, lineage=wanted.lineage, manifest_path=self._place() if is_newest else "",
            reason="" if is_newest else "superseded",
        )  # fmt: skip
        self.post("trainer", answer)

    def fail_to_load(self) -> None:
        worker = self._alive()
        if worker is not None and worker.announced > worker.version:
            event = WorkerVersionFailed(
                worker=worker.name, version=worker.announced, lineage=worker.lineage, reason="checksum"
            )
            worker.announced = worker.version
            self.post(worker.name, event)

    def resend(self) -> None:
        if (worker := self._alive()) is not None:
            self._resend(worker)

    def _resend(self, worker: VirtualWorker) -> None:
        for lease_id, (event, versions) in list(worker.unacked.items()):
            self.post(worker.name, event, {lease_id: versions})

    def kill_worker(self) -> None:
        """kill -9: what it had sent may still arrive, its finished but unsent work is gone."""
        if (worker := self._alive()) is not None:
            worker.is_away = worker.is_external or worker.name in self.leaving
            self.leaving.discard(worker.name)
            # its command reports the end of an external worker, or its machine is gone and it falls silent
            is_silent = worker.is_external and self.rng.random() < 0.5
            self._die(worker, "killed", is_permanent=worker.is_away, may_return=is_silent)

    def join_external(self) -> None:
        """A worker joins that somebody else has started; the controller gives it a name that was never used."""
        num_external = sum(worker.is_external for worker in self.workers.values())
        if self.settings.is_colocated or num_external >= 5:
            return
        worker = VirtualWorker(f"rollout-{100 + num_external}", capacity=self.rng.choice([1, 4]), is_external=True)
        worker.speed = self.rng.choice([1, 4])
        self.workers[worker.name] = worker
        self.hello(worker)

    def drain_external(self) -> None:
        """A preemption notice."""
        external = [worker for worker in self.workers.values() if worker.is_external and worker.is_alive]
        if external:
            self._drain(self.rng.choice(external))

    def _die(self, worker: VirtualWorker, reason: str, *, is_permanent: bool, may_return: bool = False) -> None:
        worker.is_alive, worker.is_known = False, False
        worker.tasks.clear()
        worker.unacked.clear()
        worker.recalled.clear()
        worker.version = worker.announced = -1
        worker.has_memory = worker.is_release_due = False
        incarnation = str(worker.incarnation)
        lost = WorkerLost(
            worker=worker.name, reason=reason, incarnation=incarnation, is_permanent=is_permanent, may_return=may_return
        )
        self.post("shell", lost)

    def restart_worker(self) -> None:
        """By the supervisor, or by an operator who adds a worker."""
        dead = [worker for worker in self.workers.values() if not worker.is_alive and not worker.is_external]
        if dead:
            self._restart(self.rng.choice(dead))

    def _restart(self, worker: VirtualWorker) -> None:
        worker.is_alive, worker.is_leaving, worker.is_away = True, False, False
        worker.incarnation += 1
        self.hello(worker)

    def silence(self) -> None:
        """The controller believes a worker lost that goes on working."""
        worker = self._alive()
        if worker is not None and worker.is_known:
            worker.is_known = False
            is_external = worker.is_external
            lost = WorkerLost(
                worker=worker.name, reason="silent", may_live=True, is_permanent=is_external, may_return=is_external
            )
            self.handle(lost)

    def come_back(self) -> None:
        lost = [worker for worker in self.workers.values() if worker.is_alive and not worker.is_known]
        if lost:
            self.hello(self.rng.choice(lost))

    # ------------------------------------------------------------ trainer

    def request_batch(self) -> None:
        """The trainer asks for its next batch, at most one step ahead."""
        trainer = self.trainer
        step = max([trainer.version, *trainer.batches]) + 1
        is_free = trainer.is_alive and trainer.asked is None and step <= trainer.version + 2
        if is_free and trainer.version >= 0 and (trainer.last_step is None or step <= trainer.last_step):
            trainer.asked = step
            self.post("trainer", BatchRequested(step=step))

    def finish_step(self) -> None:
        trainer = self.trainer
        if not trainer.is_alive:
            return
        step = trainer.version + 1
        if step in trainer.batches and (trainer.last_step is None or step <= trainer.last_step):
            self._check_batch(trainer.batches[step])
            trainer.steps[step] = trainer.batches.pop(step).groups
            trainer.version = step
            self.post("trainer", Published(version=step, lineage=self.lineage, manifest_path=self._place()))
            if step % self.checkpoint_every == 0:
                self.post("trainer", CheckpointTaken(version=step, path=f"c{step}"))
        if trainer.last_step is not None and trainer.version >= trainer.last_step and not trainer.is_done:
            trainer.is_done = True
            self.post("trainer", CheckpointTaken(version=trainer.version, path=f"c{trainer.version}"))

    def _check_batch(self, batch: SendBatch) -> None:
        """`exactly-once`: what is trained on is what the ledger says of the step, in order, and nothing twice."""
        trainer = self.trainer
        recorded = self.ledger.batches[batch.step]
        is_same = (batch.groups, batch.reused) == (recorded.groups, recorded.reused)
        assert is_same, "exactly-once: another batch than was recorded"
        assert sorted(trainer.steps) == list(range(1, batch.step)), "exactly-once: a step was left out"
        before = {group.group_id for groups in trainer.steps.values() for group in groups}
        again = before & {group.group_id for group in batch.groups}
        assert not again, f"exactly-once: groups {sorted(again)} are trained on twice along one lineage"

    def kill_trainer(self) -> None:
        """kill -9 of the trainer (one of its ranks): its messages are received, or not; it starts from a checkpoint."""
        trainer = self.trainer
        if not trainer.is_alive or trainer.is_done or self.end is not None:
            return
        trainer.is_alive = False
        self.num_trainer_deaths += 1
        words = [letter for letter in self.letters if letter[0] == "trainer"]
        self.letters = [letter for letter in self.letters if letter[0] != "trainer"]
        if self.rng.random() < 0.7:  # else they never arrive: the hub has forgotten who sent them
            for _, event, tokens in words:
                if self.end is None:
                    self.handle(event, tokens)
        if self.end is not None:
            return
        self.lineage = f"l{len(self.ledger.lineages)}"
        state = self.ledger.load()
        saved = [checkpoint.version for checkpoint in state.checkpoints]
        base = self.rng.choice(saved[-2:]) if saved else 0
        batches = tuple(batch for batch in state.batches if batch.step > base)
        self.handle(TrainerRestarted(reason="killed", lineage=self.lineage, checkpoint_version=base, batches=batches))
        steps = {step: groups for step, groups in trainer.steps.items() if step <= base}
        self.trainer = VirtualTrainer(version=base, is_alive=False, steps=steps)
        self.num_damages.clear()

    def start_trainer(self) -> None:
        """It has loaded its checkpoint."""
        if not self.trainer.is_alive:
            self.trainer.is_alive = True
            version = self.trainer.version
            self.post("trainer", Published(version=version, lineage=self.lineage, manifest_path=self._place()))

    # ------------------------------------------------------------ time and the end of lives

    def tick(self) -> None:
        self.now_s += self.rng.choice([0.5, 1.0, 3.0])
        self.handle(Tick())

    def crash(self) -> None:
        """kill -9 of the controller in the middle of an event; every process of the run dies with it, then a resume."""
        if self.letters and self.end is None:
            _, event, tokens = self.letters.pop(0)
            is_committed = self.rng.random() < 0.7
            self.handle(event, tokens, is_committed=is_committed, is_sent=False)
        self.restart()

    def restart(self, load: Callable[[], LedgerState] | None = None) -> None:
        self.lineage = f"l{len(self.ledger.lineages)}"
        self.letters.clear()
        self.leaving.clear()
        state = (load or self.ledger.load)()
        saved = [checkpoint.version for checkpoint in state.checkpoints]
        base = self.rng.choice(saved[-2:]) if saved else 0
        self.end = None
        self.coordinator = self.restored(state)
        self.now_s = self.rng.uniform(0, 5)
        self.handle(RunStarted(lineage=self.lineage, checkpoint_version=base))
        steps = {batch.step: batch.groups for batch in state.batches if batch.step <= base}
        self.trainer = VirtualTrainer(version=base, steps=steps)
        self.num_damages.clear()
        self.post("trainer", Published(version=base, lineage=self.lineage, manifest_path=self._place()))
        # external workers have the keys of the earlier session
        self.workers = {name: worker for name, worker in self.workers.items() if not worker.is_external}
        for worker in self.workers.values():
            worker.incarnation += 1
            worker.version = worker.announced = -1
            worker.has_memory = worker.is_release_due = False
            worker.is_alive, worker.is_leaving, worker.is_away = True, False, False
            worker.tasks.clear()
            worker.unacked.clear()
            worker.recalled.clear()
            self.hello(worker)

    def restored(self, state: LedgerState) -> Coordinator:
        return Coordinator.restore(self.settings, state)

    # ------------------------------------------------------------ liveness

    def run_to_end(self, max_rounds: int = 600) -> EndRun:
        """Faults stop; the run must finish."""
        for _ in range(max_rounds):
            if self.end is not None:
                break
            self.calm_round()
        assert self.end is not None, "deadlock: " + " | ".join(self.coordinator.waits())
        return self.end

    def calm_round(self) -> None:
        """Everybody does what is due, and everything arrives."""
        for worker in self.workers.values():
            if worker.is_away:
                continue
            if not worker.is_alive:
                self._restart(worker)
            elif not worker.is_known:
                self.hello(worker)
            self._load(worker)
            self._release(worker)
            self._generate(worker, 3)
            self._report(worker)
            self._answer_recalls(worker)
        self.resend()
        self.start_trainer()
        self.write_again()
        self.request_batch()
        self.deliver_all()
        for worker in self.workers.values():
            self._leave(worker)
            if worker.is_alive:
                self._tell_speed(worker)
        self.finish_step()
        self.deliver_all()
        self.now_s += 1.0
        self.handle(Tick())

    def check_end(self) -> None:
        """After a completed run: every step was shipped once, and nobody waits for an acknowledgement."""
        assert self.end is not None
        if self.end.status == "completed":
            assert self.coordinator.shipped == self.settings.num_steps
            assert sorted(self.ledger.batches) == list(range(1, self.settings.num_steps + 1))
        if self.settings.on_stale == "wait":
            assert self.ledger.fates["stale"] == self.ledger.fates["surplus"] == 0, (
                "bounded-staleness: wait must lose nothing"
            )
        self.resend()
        self.deliver_all()
        for worker in self.workers.values():
            self.deliver_all()
            for lease_id, (event, versions) in list(worker.unacked.items()):
                self.handle(event, {lease_id: versions})
            assert not worker.unacked, "exactly-once: a finished sample was never acknowledged"
