"""Rollout workers that take time instead of computing, around the real coordinator, under a virtual clock.

Contains the speed of a device, workers that decode, prefill and return leases at that speed, and one synchronous run;
routing.py compares. Nothing here is measured: figures are emulated, and labelled so.

A decode step of b answers takes `floor_s + b * per_answer_s`; prefilling takes `prefill_s` per token, and a prompt that
the worker has already prefilled for the same group costs nothing. Lengths are drawn by (seed, group, sample), so every
policy gets the same answers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import LeaseOrder, SendBatch, SendLeases, SendRecall, SendVersion
from controller.coordinator.events import (
    BatchRequested,
    Event,
    LeaseReturned,
    PartialReport,
    ProgressReported,
    Published,
    RunStarted,
    SampleReported,
    Tick,
    WorkerJoined,
    WorkerSpeed,
    WorkerVersionLoaded,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.settings import CoordinatorSettings
from controller.runtime.throughput_gauge import SpeedGauge

REPORT_S = 0.5
TICK_S = 0.2
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Pace:
    """Time of a device for a decode step and for a prefilled token, in seconds."""

    floor_s: float
    per_answer_s: float
    prefill_s: float
    slowness: float = 1.0

    def step_s(self, num_answers: int) -> float:
        """Time of one token for each of `num_answers` answers."""
        return self.slowness * (self.floor_s + self.per_answer_s * num_answers)


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of answer lengths, cut at `most` tokens: the long tail of thinking models, scaled."""

    median: float = 200.0
    sigma: float = 1.0
    most: int = 2000

    def draw(self, seed: int, group_id: int, sample_index: int) -> int:
        """Number of tokens of one answer."""
        rng = random.Random(f"{seed}/{group_id}/{sample_index}")
        return max(1, min(self.most, round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)))))


@dataclass
class Answer:
    """A lease on a worker."""

    order: LeaseOrder
    length: int
    num_tokens: int
    num_reported: int


@dataclass
class Worker:
    """One worker: answers in order of arrival, of which the first `num_slots` are decoded at once."""

    name: str
    pace: Pace
    num_slots: int
    answers: dict[int, Answer] = field(default_factory=dict)
    recalled: list[int] = field(default_factory=list)
    debt_s: float = 0.0
    """Prefill time that delays the next step."""
    prompts: set[int] = field(default_factory=set)
    version: int = -1
    is_stepping: bool = False
    tokens: float = 0.0
    steps: float = 0.0
    busy_s: float = 0.0
    next_report_s: float = 0.0


@dataclass
class Outcome:
    """Results of a run, in seconds of the virtual clock."""

    step_s: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)
    """For each step: from the first worker without further answers to the last answer."""
    prefill_tokens: int = 0
    num_migrated: int = 0


class PacedRun:
    """One synchronous run: a step begins when its version is loaded and ends with its batch."""

    def __init__(self, settings: CoordinatorSettings, paces: list[Pace], lengths: Lengths, *, slots: int, seed: int):
        self._lengths, self._seed, self._settings = lengths, seed, settings
        self._coordinator = Coordinator(settings)
        self._workers = {f"w{i}": Worker(f"w{i}", pace, slots) for i, pace in enumerate(paces)}
        self._queue: list[tuple[float, int, str]] = []
        self._count = itertools.count()
        self.now_s = 0.0
        self._outcome = Outcome()
        self._step_began_s = 0.0
        self._dry_s: dict[str, float] = {}
        self._gauge = SpeedGauge()

    def run(self) -> Outcome:
        """Run to the last step."""
        self._handle(RunStarted(lineage="l0"))
        for worker in self._workers.values():
            self._handle(WorkerJoined(worker=worker.name, incarnation="a", capacity=2 * worker.num_slots))
        self._publish(0)
        self._push(TICK_S, "")
        while not self._coordinator.is_over and self._coordinator.shipped < self._settings.num_steps:
            self.now_s, _, name = heapq.heappop(self._queue)
            if name:
                self._stepped(self._workers[name])
            else:
                self._tick()
        return self._outcome

    # ------------------------------------------------------------ time

    def _push(self, after_s: float, name: str) -> None:
        heapq.heappush(self._queue, (self.now_s + after_s, next(self._count), name))

    def _tick(self) -> None:
        for worker in self._workers.values():
            counters = {"tokens": worker.tokens, "steps": worker.steps, "busy_s": worker.busy_s}
            if speed := self._gauge.read(worker.name, "a", counters):
                self._handle(WorkerSpeed(worker=worker.name, tokens_per_s=speed[0], steps_per_s=speed[1]))
        self._handle(Tick())
        self._push(TICK_S, "")

    # ------------------------------------------------------------ workers

    def _start_step(self, worker: Worker) -> None:
        """Decode until the first answer ends or the next report is due."""
        active = list(worker.answers.values())[: worker.num_slots]
        if worker.is_stepping or not active:
            return
        step_s = worker.pace.step_s(len(active))
        until_report = max(1, int((worker.next_report_s - self.now_s) / step_s))
        count = min(until_report, *(answer.length - answer.num_tokens for answer in active))
        took_s = worker.debt_s + count * step_s
        worker.debt_s, worker.is_stepping = 0.0, True
        worker.tokens += count * len(active)
        worker.steps += count
        worker.busy_s += took_s
        for answer in active:
            answer.num_tokens += count
        self._push(took_s, worker.name)

    def _stepped(self, worker: Worker) -> None:
        worker.is_stepping = False
        done = [lease_id for lease_id, answer in worker.answers.items() if answer.num_tokens >= answer.length]
        if self.now_s >= worker.next_report_s:
            worker.next_report_s = self.now_s + REPORT_S
            self._report(worker)
        for lease_id in worker.recalled:
            if lease_id in worker.answers and lease_id not in done:
                self._give_back(worker, lease_id)
        worker.recalled.clear()
        for lease_id in done:
            self._finish(worker, lease_id)
        if not worker.answers:
            self._dry_s.setdefault(worker.name, self.now_s)
        self._start_step(worker)

    def _part(self, lease_id: int, answer: Answer, version: int) -> PartialReport:
        fresh = answer.num_tokens - answer.num_reported
        part = PartialReport(
            lease_id=lease_id, start=answer.num_reported, num_tokens=fresh,
            first_version=version if fresh else -1, last_version=version if fresh else -1,
        )  # fmt: skip
        answer.num_reported = answer.num_tokens
        return part

    def _report(self, worker: Worker) -> None:
        parts = tuple(
            self._part(lease_id, answer, worker.version)
            for lease_id, answer in worker.answers.items()
            if answer.num_reported < answer.num_tokens < answer.length
        )
        if parts:
            self._handle(ProgressReported(worker=worker.name, items=parts))

    def _give_back(self, worker: Worker, lease_id: int) -> None:
        part = self._part(lease_id, worker.answers.pop(lease_id), worker.version)
        self._handle(LeaseReturned(worker=worker.name, part=part, reason="migrated"))

    def _finish(self, worker: Worker, lease_id: int) -> None:
        answer = worker.answers.pop(lease_id)
        outcome = SampleOutcome(
            lease_id=lease_id, group_id=answer.order.group_id,
            sample_index=answer.order.sample_index, num_tokens=answer.length, first_version=worker.version,
            last_version=worker.version, verdict_kind="scored", value=float(answer.order.sample_index),
        )  # fmt: skip
        self._handle(SampleReported(worker=worker.name, outcome=outcome))

    def _take(self, worker: Worker, order: LeaseOrder) -> None:
        length = self._lengths.draw(self._seed, order.group_id, order.sample_index)
        worker.answers[order.lease_id] = Answer(order, length, order.prefix_tokens, order.prefix_tokens)
        self._dry_s.pop(worker.name, None)
        num_prefill = order.prefix_tokens + (0 if order.group_id in worker.prompts else PROMPT_TOKENS)
        worker.prompts.add(order.group_id)
        worker.debt_s += worker.pace.slowness * worker.pace.prefill_s * num_prefill
        self._outcome.prefill_tokens += num_prefill
        self._outcome.num_migrated += bool(order.moved_from)

    # ------------------------------------------------------------ controller and trainer

    def _handle(self, event: Event) -> None:
        for effect in self._coordinator.handle(event, self.now_s):
            match effect:
                case SendLeases():
                    worker = self._workers[effect.worker]
                    for order in effect.leases:
                        if self._coordinator.is_live(order.lease_id):
                            self._take(worker, order)
                    self._start_step(worker)
                case SendRecall():
                    self._workers[effect.worker].recalled += effect.lease_ids
                case SendVersion():
                    self._workers[effect.worker].version = effect.version
                    loaded = WorkerVersionLoaded(worker=effect.worker, version=effect.version, lineage="l0")
                    self._handle(loaded)
                case SendBatch():
                    self._ended(effect.step)

    def _ended(self, step: int) -> None:
        """Complete the batch. The trainer takes no time, and the next step begins."""
        self._outcome.step_s.append(self.now_s - self._step_began_s)
        self._outcome.tail_s.append(self.now_s - min([self.now_s, *self._dry_s.values()]))
        if step < self._settings.num_steps:
            self._publish(step)

    def _publish(self, version: int) -> None:
        self._step_began_s = self.now_s
        self._dry_s = {}
        self._handle(Published(version=version, lineage="l0", manifest_path=f"v{version}"))
        self._handle(BatchRequested(step=version + 1))
