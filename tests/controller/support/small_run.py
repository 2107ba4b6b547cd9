"""A whole small run in one process: real hub, coordinator, ledger and server; worker and trainer speak real messages.

The peers are scripted: a rollout worker that answers leases at once, a trainer that turns a batch into the next
version. What they do wrong on request (vanish, repeat, forget) is what a test is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from made_keys import run_keys
from rich.console import Console

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import OperationError, ProcessDied
from areal_like.metrics import read_jsonl
from areal_like.trace import Tracer
from areal_like.trajectory import Segment, Trajectory
from areal_like.transport.channel import Hub, Peer
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.events import RunStarted
from controller.coordinator.settings import CoordinatorSettings
from controller.data.eval_layout import EvalLayout, SetSize
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger
from controller.runtime.components import RunComponents
from controller.runtime.control_requests import Requests
from controller.runtime.inbound import ACCEPTED
from controller.runtime.outbound import TaskSettings
from controller.runtime.outcome import Outcome, RunEnd
from controller.runtime.server import Server, ServerSettings
from controller.runtime.supervisor import Loss
from controller.runtime.trainer_restart import TrainerRestart
from controller.runtime.worker_admin import WorkerAdmin
from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.pulse import ProcessNow
from controller.telemetry.sinks import Sink, Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import Tally
from controller.telemetry.telemetry import Telemetry

DEADLINE_S = 300.0
ANSWER_TOKENS = 4


def bounded(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; a hang is a failure."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    asyncio.run(main())


def assert_whole(folder: Path, num_steps: int) -> None:
    """The ledger keeps the invariants and holds so many steps."""
    report = audit(folder)
    assert report.is_clean, report.lines()
    assert report.num_steps == num_steps


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about; `bounded` is the deadline."""
    while not is_so():  # noqa: ASYNC110  (what is awaited has no event)
        await asyncio.sleep(0.01)


class NoProcesses:
    """A supervisor of nothing: tests say what is lost."""

    def __init__(self) -> None:
        self.losses: list[Loss | Exception] = []
        self.ended: list[str] = []
        self.released: list[str] = []
        self.gone: set[str] = set()
        self.received: list[str] = []
        self.out_of_touch: list[str] = []
        self.left: list[str] = []
        """Announced that they leave for good."""
        self.added: list[str] = []
        self.renewed: list[ProcessSpec] = []
        """Specs of the trainer's later lives."""
        self.restarts = 0
        self.members = ["trainer", "reward", "rollout-0"]
        self.now: dict[str, ProcessNow] = {}

    async def tick(self, now_s: float) -> list[Loss]:
        losses, self.losses = self.losses, []
        for loss in losses:
            if isinstance(loss, Exception):
                raise loss
        return [loss for loss in losses if isinstance(loss, Loss)]

    def renew(self, change: Callable[[ProcessSpec], ProcessSpec]) -> None:
        spec = ProcessSpec(
            role="trainer", name="trainer", run_id="r", run_dir="", hub_address="", parent_pid=1, seed=1,
            model=ModelSettings(path=""), sampling=SamplingSettings(), staleness=StalenessSettings(),
            groups_per_step=1, group_size=1, num_steps=1, weight_dir="", settings={},
        )  # fmt: skip
        self.renewed.append(change(spec))

    def reported(self, name: str) -> None:
        self.received.append(name)

    def release(self, name: str) -> None:
        self.released.append(name)

    def leaving(self, name: str, now_s: float) -> None:
        self.left.append(name)

    def is_external(self, name: str) -> bool:
        return False

    def is_leaving(self, name: str) -> bool:
        return name in self.left or name in self.gone

    def lost_touch(self, name: str, now_s: float) -> None:
        self.out_of_touch.append(name)

    def watches(self, name: str) -> bool:
        return name not in self.gone

    def watches_role(self, role: str) -> bool:
        return not any(name.startswith(role) for name in self.gone)

    def names_of(self, role: str) -> list[str]:
        return [name for name in self.members if name.startswith(role) and name not in self.gone]

    def living(self, role: str) -> list[str]:
        return []

    def is_pool_unplaced(self) -> bool:
        return False

    def take_ended(self) -> list[str]:
        ended, self.ended = self.ended, []
        return ended

    def take_news(self) -> list[str]:
        return []

    def is_running(self, name: str) -> bool:
        return name not in self.gone

    def states(self) -> dict[str, str]:
        return {}

    def processes(self) -> dict[str, ProcessNow]:
        return self.now

    def cpu_seconds(self) -> dict[str, float]:
        return {name: 1.0 for name in self.now}

    def queue_seconds(self) -> dict[str, float]:
        return {}

    def died(self, loss: Loss) -> OperationError:
        if loss.is_divergence:
            return OperationError(loss.reason)
        return ProcessDied(loss.name, loss.returncode or -9, "its last words")


class PlainRows:
    """Rows that name their draw."""

    def train(self, group_id: int) -> dict[str, Any]:
        return {"prompt": f"draw {group_id}"}

    layout = EvalLayout({"": SetSize(1000, 1000, 1000)})

    def eval(self, index: int) -> dict[str, Any]:
        return {"prompt": f"eval {index}"}


@dataclass
class SmallRun:
    """Everything of one process life of a run. Made by `small_run`."""

    server: Server
    parts: RunComponents
    supervisor: NoProcesses
    shown: StringIO
    folder: Path
    address: str
    lineage: str
    base: int
    peers: list[Peer] = field(default_factory=list)

    @property
    def coordinator(self) -> Coordinator:
        return self.parts.coordinator

    @property
    def ledger(self) -> Ledger:
        return self.parts.ledger

    @property
    def hub(self) -> Hub:
        return self.parts.hub

    @property
    def tally(self) -> Tally:
        return self.parts.telemetry.tally

    async def go(self) -> Outcome:
        return await self.server.run([RunStarted(lineage=self.lineage, checkpoint_version=self.base)])

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.folder / "metrics.jsonl") if row["kind"] == kind]

    async def connect(self, name: str, role: m.Role, accept: set[type], capacity: int = 0) -> Peer:
        hello = m.Hello(
            role=role, name=name, pid=os.getpid(), run_id="r", incarnation=secrets.token_hex(4), capacity=capacity
        )
        peer = Peer(
            address=self.address, hello=hello, curve_dir=run_keys(), audience="controller",
            accept=frozenset(accept), heartbeat_s=0.05, silence_s=10.0,
            status=lambda: m.Heartbeat(state="busy", counters={"tokens": 1.0, "wait_s": 1.0}),
        )  # fmt: skip
        self.peers.append(peer)
        await peer.connect(5.0)
        return peer


@contextlib.asynccontextmanager
async def small_run(
    folder: Path, *, base: int = 0, stop_on_long_prompt: bool = False, stop_grace_s: float = 30.0,
    stall_after_s: float = 60.0, rows: Any = None, sinks: Sequence[Sink] = (),
    client_addresses: Mapping[str, str] | None = None, **settings: Any,
) -> AsyncIterator[SmallRun]:  # fmt: skip
    chosen = {"groups_per_step": 2, "group_size": 2, "num_steps": 3, "max_staleness": 2, **settings}
    ledger = Ledger(folder, run_id="r")
    state = ledger.load()
    coordinator = Coordinator.restore(CoordinatorSettings(**chosen), state)
    hub = Hub(run_id="r", role="controller", bind="tcp://127.0.0.1:0", curve_dir=run_keys(), accept=ACCEPTED)
    address = await hub.start()
    shown = StringIO()
    supervisor, tally = NoProcesses(), Tally()
    journal, opened = Journal(folder / "metrics.jsonl"), Sinks(sinks)
    journal.listen(opened)
    tracer = Tracer(folder / "controller.trace.jsonl", "controller")
    greedy, warm = m.Sampling(temperature=0.0), m.Sampling(temperature=1.0)
    display = Display("plain", Console(file=shown, width=200))
    status = StatusFile(folder / "status.json", run="small", num_steps=chosen["num_steps"])
    parts = RunComponents(
        coordinator=coordinator, ledger=ledger, hub=hub, supervisor=supervisor,  # type: ignore[arg-type]
        worker_admin=WorkerAdmin(
            coordinator, supervisor, hub, Requests(folder / "requests"),  # type: ignore[arg-type]
            add_worker=lambda: supervisor.added.append("rollout-9") or "rollout-9", say=display.note,
        ),
        trainer_restart=TrainerRestart(
            folder, ledger, supervisor, num_lineages=state.num_lineages + 1,  # type: ignore[arg-type]
            new_address=lambda: "tcp://127.0.0.1:1",
        ),
        rows=rows or PlainRows(), telemetry=Telemetry(display, journal, status, tally, opened), tracer=tracer,
        end=RunEnd(),
    )  # fmt: skip
    server = Server(
        ServerSettings(
            tasks=TaskSettings(seed=1, train_sampling=warm, eval_sampling=greedy, segment_tokens=0),
            num_steps=chosen["num_steps"],
            stop_on_long_prompt=stop_on_long_prompt,
            stall_after_s=stall_after_s,
            stop_grace_s=stop_grace_s,
            client_addresses=client_addresses or {},
        ),
        parts,
    )
    run = SmallRun(server, parts, supervisor, shown, folder, address, f"l{state.num_lineages}", base)
    try:
        yield run
    finally:
        for peer in run.peers:
            await peer.close("over")
        opened.close(5.0)
        await hub.close()
        ledger.close()
        journal.close()
        tracer.close()


@contextlib.asynccontextmanager
async def concurrently(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[Sequence[asyncio.Task[Any]]]:
    """Peers at work while the body runs; what one of them raises fails the test."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result


def answer(
    task: m.SampleTask, version: int, *, num_tokens: int = ANSWER_TOKENS, reward: float = 1.0
) -> m.SampleFinished:
    """The finished sample of a lease; its prefix is kept, the rest is sampled at `version`."""
    fresh = num_tokens - len(task.prefix)
    whole = task.prefix.joined(segment(fresh, version, start=len(task.prefix)))
    return m.SampleFinished(
        lease_id=task.lease_id,
        group_id=task.group_id,
        sample_index=task.sample_index,
        trajectory=Trajectory.from_prompt(np.arange(3, dtype=np.int32), whole, "stop"),
        verdict=Verdict(kind="scored", value=reward, components={"correct": 1.0, "format": 0.5}),
    )


def segment(count: int, version: int, start: int = 0) -> Segment:
    return Segment(
        np.arange(start, start + count, dtype=np.int32),
        np.full(count, -0.5, np.float32),
        np.full(count, version, np.int32),
    )


class Worker:
    """A rollout worker that finishes every lease as soon as it has the version. Override `on_lease`."""

    ACCEPT = frozenset({m.Lease, m.SampleAck, m.CancelLeases, m.AnnounceVersion})

    def __init__(self, run: SmallRun, name: str = "rollout-0", capacity: int = 8) -> None:
        self.run, self.name, self.capacity = run, name, capacity
        self.version = -1
        self.leased: list[m.SampleTask] = []
        self.acked: list[int] = []
        self.was_shut_down = False
        self.peer: Peer

    async def work(self) -> None:
        self.peer = await self.run.connect(self.name, "rollout", set(self.ACCEPT), self.capacity)
        while True:
            message = await self.peer.receive(1.0)
            match message:
                case m.AnnounceVersion():
                    self.version = max(self.version, message.version)
                    await self.peer.send(
                        m.VersionLoaded(version=message.version, lineage=message.lineage, stage_s=0.0, pause_s=0.0)
                    )
                case m.Lease():
                    self.leased += message.tasks
                    for task in message.tasks:
                        await self.on_lease(task)
                case m.SampleAck():
                    self.acked += message.lease_ids
                case m.Shutdown():
                    self.was_shut_down = True
                    await self.peer.close("asked to")
                    return

    async def on_lease(self, task: m.SampleTask) -> None:
        await self.peer.send(answer(task, self.version))


class Trainer:
    """A trainer of no model: version n is published as soon as batch n came. Override `on_batch`."""

    ACCEPT = frozenset({m.Batch, m.NoMoreBatches, m.SaveCheckpoint})

    def __init__(self, run: SmallRun) -> None:
        self.run, self.version, self.lineage = run, run.base, run.lineage
        self.batches: list[m.Batch] = []
        self.last_step: int | None = None
        self.has_left = False
        self.peer: Peer

    async def work(self) -> None:
        self.peer = await self.run.connect("trainer", "trainer", set(self.ACCEPT))
        await self.publish({})
        await self.peer.send(m.BatchRequest(step=self.version + 1))
        while self.last_step is None or self.version < self.last_step:
            match await self.peer.receive(1.0):
                case m.Batch() as batch:
                    self.batches.append(batch)
                    await self.on_batch(batch)
                case m.NoMoreBatches() as news:
                    self.last_step = news.last_step
                case m.Shutdown():
                    break
        await self.leave()

    async def on_batch(self, batch: m.Batch) -> None:
        self.version = batch.step
        await self.publish({"reward_mean": 0.5, "loss": 0.1, "grad_norm": 1.0, "step": -1.0})
        await self.peer.send(m.BatchRequest(step=batch.step + 1))

    async def publish(self, metrics: dict[str, float]) -> None:
        lineage, manifest = self.lineage, f"v{self.version}"
        note = "" if metrics else "attention sdpa (auto)"
        await self.peer.send(
            m.VersionPublished(
                version=self.version, lineage=lineage, manifest_path=manifest, metrics=metrics, note=note
            )
        )

    async def leave(self) -> None:
        await self.peer.send(m.CheckpointSaved(version=self.version, path=f"c{self.version}"))
        await self.peer.close("done")
        self.has_left = True
