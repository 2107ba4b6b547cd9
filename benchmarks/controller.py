"""How many trajectories can one controller process? The real hub, coordinator, ledger and server; simulated peers.

    python -m benchmarks.controller                 1 to 512 workers, trajectories of 2,000 tokens: about six minutes
    python -m benchmarks.controller --quick         two sizes, few steps; writes nothing

Rollout workers and trainer are simulated by a second process that generates nothing: each lease is answered immediately
with a trajectory of --tokens tokens, each batch with the next version. Every trajectory crosses a real socket, is
checked, written to the ledger, acknowledged, and sent to the trainer in a batch.

Counted from step FIRST_STEP on: trajectories per second of wall clock, messages per second in and out, and processor
milliseconds of the controller's process per trajectory. `durable`: kill -9 loses nothing that was acknowledged (the
default). `fsync`: power loss does not either (group commit: one fsync per burst of messages). `bare`: a ZeroMQ ROUTER
that receives the same frames and answers each with an empty one, the limit of the sockets. A step has 1,024
trajectories, or 8,192 (512 prompts of 16 answers, as in AReaL's runs, arXiv 2505.24298): announcing a version to a
worker and its reply are two messages per step, independent of the size of the step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq
from rich.console import Console

from areal_like.process import die_with_starter
from areal_like.trace import Tracer
from areal_like.trajectory import Segment, Trajectory
from areal_like.transport.channel import Hub, Peer
from areal_like.transport.credentials import make_run_credentials
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from areal_like.wire.encoding import encode
from benchmarks.measured import INTEGERS
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
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
from controller.runtime.outcome import RunEnd
from controller.runtime.server import Server, ServerSettings
from controller.runtime.supervisor import Loss
from controller.runtime.trainer_restart import TrainerRestart
from controller.runtime.worker_admin import WorkerAdmin
from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.pulse import ProcessNow
from controller.telemetry.sinks import Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import Tally
from controller.telemetry.telemetry import Telemetry

GROUPS, GROUP_SIZE, BOUND = 64, 16, 2
"""A step has 1,024 trajectories."""
PAPER_GROUPS, QUICK_GROUPS = 512, 8
FIRST_STEP = 1
MOST_HELD = 512
"""Largest number of trajectories that a worker answers at once. It does not receive while it sends, and their
acknowledgements and further leases must fit into its queue (areal_like/transport/sockets.py); otherwise the controller
would disconnect it."""
IN_FLIGHT = 64
"""Messages in flight of the bare sender."""
RUN = "benchmark"
PROMPT_TOKENS = 200
WORKER_ACCEPTS = frozenset({m.Lease, m.SampleAck, m.CancelLeases, m.AnnounceVersion})
TRAINER_ACCEPTS = frozenset({m.Batch, m.NoMoreBatches, m.SaveCheckpoint})
DEADLINE_S = 600.0


class Meeting(NamedTuple):
    """The controller's address and what the simulated processes need to join."""

    hub: str
    keys: Path


class NoProcesses:
    """A supervisor without processes: peers connect by themselves."""

    restarts = 0

    async def tick(self, now_s: float) -> list[Loss]:
        """No losses."""
        return []

    def reported(self, name: str) -> None:
        """Do nothing."""

    def release(self, name: str) -> None:
        """Do nothing."""

    def lost_touch(self, name: str, now_s: float) -> None:
        """Exit: a peer that cannot be reached would make the figures invalid."""
        raise SystemExit(f"{name} cannot be reached")

    def watches(self, name: str) -> bool:
        """True for every process."""
        return True

    def watches_role(self, role: str) -> bool:
        """True for every process."""
        return True

    def is_leaving(self, name: str) -> bool:
        """False for every process."""
        return False

    def is_pool_unplaced(self) -> bool:
        """False: processes are not placed."""
        return False

    def take_ended(self) -> list[str]:
        """No processes."""
        return []

    def take_news(self) -> list[str]:
        """No messages."""
        return []

    def is_running(self, name: str) -> bool:
        """True for every process."""
        return True

    def states(self) -> dict[str, str]:
        """Empty."""
        return {}

    def processes(self) -> dict[str, ProcessNow]:
        """Empty."""
        return {}

    def cpu_seconds(self) -> dict[str, float]:
        """Empty."""
        return {}

    def queue_seconds(self) -> dict[str, float]:
        """Empty."""
        return {}


class AnyRows:
    """Rows whose prompt is the number of the group."""

    def train(self, group_id: int) -> dict[str, Any]:
        """The row of a group."""
        return {"prompt": f"draw {group_id}", "answer": "0"}

    layout = EvalLayout({"": SetSize(1000, 1000, 1000)})

    def eval(self, index: int) -> dict[str, Any]:
        """Not used: there is no evaluation."""
        raise AssertionError(index)


# ------------------------------------------------------------ the controller


class Marks:
    """Records wall and processor time of this process, and messages of its hub, after every step."""

    def __init__(self) -> None:
        self.hub: Hub | None = None
        self.messages: list[int] = []
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def offer(self, record: Mapping[str, Any]) -> None:
        """Take a row of the journal; only rows of steps are used."""
        if record["kind"] == "step":
            self.wall_s.append(time.perf_counter())
            self.cpu_s.append(time.process_time())
            assert self.hub is not None, "a step before the start"
            self.messages.append(self.hub.counters["sent"] + self.hub.counters["received"])


async def serve(
    folder: Path, *, workers: int, steps: int, tokens: int, fsync: bool = False, groups: int = GROUPS
) -> dict[str, float]:
    """Run one job and return its figures."""
    marks = Marks()
    async with _server(folder, workers=workers, steps=steps, fsync=fsync, groups=groups, marks=marks) as (
        server,
        address,
    ):
        peers = multiprocessing.get_context("spawn").Process(target=simulate, args=(address, workers, tokens, groups))
        peers.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                outcome = await server.run([RunStarted(lineage="l0", checkpoint_version=0)])
                await server.farewell(10.0)
        finally:
            peers.join(20)
            if peers.is_alive():
                peers.kill()
    assert outcome.status == "completed", outcome
    report = audit(folder)
    assert report.is_clean, report.lines()
    count, before = (steps - FIRST_STEP) * groups * GROUP_SIZE, FIRST_STEP - 1
    wall_s = marks.wall_s[-1] - marks.wall_s[before]
    return {
        "workers": workers,
        "trajectories_per_step": groups * GROUP_SIZE,
        "trajectories_per_s": count / wall_s,
        "messages_per_s": (marks.messages[-1] - marks.messages[before]) / wall_s,
        "cpu_ms_per_trajectory": 1e3 * (marks.cpu_s[-1] - marks.cpu_s[before]) / count,
    }


@contextlib.asynccontextmanager
async def _server(
    folder: Path, *, workers: int, steps: int, fsync: bool, groups: int, marks: Marks
) -> AsyncIterator[tuple[Server, Meeting]]:
    ledger = Ledger(folder, run_id=RUN, fsync=fsync)
    settings = CoordinatorSettings(
        groups_per_step=groups, group_size=GROUP_SIZE, num_steps=steps, max_staleness=BOUND, num_workers=workers
    )
    coordinator = Coordinator.restore(settings, ledger.load())
    make_run_credentials(folder / "keys")
    hub = Hub(run_id=RUN, role="controller", bind="tcp://127.0.0.1:0", curve_dir=folder / "keys", accept=ACCEPTED)
    address = await hub.start()
    marks.hub = hub
    journal, tally = Journal(folder / "metrics.jsonl"), Tally()
    journal.listen(marks)
    tracer = Tracer(folder / "controller.trace.jsonl", "controller")
    display, supervisor = Display("plain", Console(file=StringIO())), NoProcesses()
    crew = WorkerAdmin(
        coordinator, supervisor, hub, Requests(folder / "requests"),  # type: ignore[arg-type]
        add_worker=lambda: "", say=display.note,
    )  # fmt: skip
    tasks = TaskSettings(seed=1, train_sampling=m.Sampling(), eval_sampling=m.Sampling(), segment_tokens=0)
    restart = TrainerRestart(folder, ledger, supervisor, num_lineages=1, new_address=str)  # type: ignore[arg-type]
    status = StatusFile(folder / "status.json", run=RUN, num_steps=steps)
    parts = RunComponents(
        coordinator=coordinator, ledger=ledger, hub=hub, supervisor=supervisor,  # type: ignore[arg-type]
        worker_admin=crew, trainer_restart=restart, rows=AnyRows(), tracer=tracer, end=RunEnd(),
        telemetry=Telemetry(display, journal, status, tally, Sinks([])),
    )  # fmt: skip
    server = Server(
        ServerSettings(tasks=tasks, num_steps=steps, stop_on_long_prompt=False, stall_after_s=600.0, stop_grace_s=30.0),
        parts,
    )
    try:
        yield server, Meeting(address, folder / "keys")
    finally:
        await hub.close()
        ledger.close()
        journal.close()
        tracer.close()


# ------------------------------------------------------------ the peers, in a process of their own


def simulate(address: Meeting, workers: int, tokens: int, groups: int) -> None:
    """Simulate all rollout workers and the trainer until they are asked to end."""
    die_with_starter(os.getppid())
    asyncio.run(_simulate(address, workers, tokens, groups))


async def _simulate(address: Meeting, workers: int, tokens: int, groups: int) -> None:
    capacity = min(MOST_HELD, max(GROUP_SIZE, 2 * groups * GROUP_SIZE // workers))
    async with asyncio.TaskGroup() as group:
        group.create_task(_trainer(address))
        for index in range(workers):
            group.create_task(_worker(address, f"rollout-{index}", capacity, tokens))


async def _connect(address: Meeting, name: str, role: m.Role, accept: frozenset[type], capacity: int = 0) -> Peer:
    hello = m.Hello(
        role=role, name=name, pid=os.getpid(), run_id=RUN, incarnation=secrets.token_hex(4), capacity=capacity
    )
    peer = Peer(
        address=address.hub, hello=hello, curve_dir=address.keys, audience="controller", accept=accept,
        heartbeat_s=1.0, silence_s=60.0, status=lambda: m.Heartbeat(state="busy"),
    )  # fmt: skip
    await peer.connect(60.0)
    return peer


def trajectory(tokens: int, version: int) -> Trajectory:
    """An answer of `tokens` tokens that were all sampled at one version."""
    answer = Segment(
        np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32), np.full(tokens, version, np.int32)
    )
    return Trajectory.from_prompt(np.arange(PROMPT_TOKENS, dtype=np.int32), answer, "stop")


def finished(task: m.SampleTask, whole: Trajectory) -> m.SampleFinished:
    """The answer to a lease."""
    return m.SampleFinished(
        lease_id=task.lease_id, group_id=task.group_id, sample_index=task.sample_index, trajectory=whole,
        verdict=Verdict(kind="scored", value=float(task.sample_index % 2), components={"correct": 1.0}),
        timings={"generate_s": 1.0, "score_s": 0.1},
    )  # fmt: skip


async def _worker(address: Meeting, name: str, capacity: int, tokens: int) -> None:
    peer = await _connect(address, name, "rollout", WORKER_ACCEPTS, capacity)
    whole, version = trajectory(tokens, 0), 0
    while True:
        match await peer.receive(60.0):
            case m.AnnounceVersion() as news:
                version = max(version, news.version)
                whole = trajectory(tokens, version)
                loaded = m.VersionLoaded(version=news.version, lineage=news.lineage, stage_s=0.0, pause_s=0.0)
                await peer.send(loaded)
            case m.Lease() as lease:
                for task in lease.tasks:
                    await peer.send(finished(task, whole))
            case m.Shutdown():
                await peer.close("stopped")
                return


async def _trainer(address: Meeting) -> None:
    peer = await _connect(address, "trainer", "trainer", TRAINER_ACCEPTS)
    version, last = 0, None
    await peer.send(m.VersionPublished(version=0, lineage="l0", manifest_path="v0"))
    await peer.send(m.BatchRequest(step=1))
    while last is None or version < last:
        match await peer.receive(60.0):
            case m.Batch() as batch:
                version = batch.step
                await peer.send(m.BatchRequest(step=version + 1))
                await peer.send(
                    m.VersionPublished(
                        version=version, lineage="l0", manifest_path=f"v{version}", metrics={"reward_mean": 0.5}
                    )
                )
            case m.NoMoreBatches() as news:
                last = news.last_step
            case m.Shutdown():
                break
    await peer.send(m.CheckpointSaved(version=version, path=f"c{version}"))
    await peer.close("done")


# ------------------------------------------------------------ the limit


def bare(tokens: int, count: int) -> dict[str, float]:
    """Measure a ROUTER that only receives the frames of a finished sample and answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        sender = multiprocessing.get_context("spawn").Process(target=_send_bare, args=(port, tokens, count))
        sender.start()
        router.poll(30_000)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            frames = router.recv_multipart(copy=False)
            router.send_multipart([frames[0], b""])
        wall_s, spent_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        sender.join(30)
    rate = count / wall_s
    return {"trajectories_per_s": rate, "messages_per_s": 2 * rate, "cpu_ms_per_trajectory": 1e3 * spent_s / count}


def _send_bare(port: int, tokens: int, count: int) -> None:
    die_with_starter(os.getppid())
    task = m.SampleTask(
        lease_id=1, group_id=1, sample_index=1, purpose="train", min_version=0, row={}, sampling=m.Sampling(), seed=1,
        prefix=Segment(*(np.zeros(0, kind) for kind in (np.int32, np.float32, np.int32))),
    )  # fmt: skip
    frames = encode(finished(task, trajectory(tokens, 0)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        in_flight = 0
        for _ in range(count):
            dealer.send_multipart(frames, copy=False)
            in_flight += 1
            while in_flight >= IN_FLIGHT or (in_flight and dealer.poll(0)):
                dealer.recv_multipart()
                in_flight -= 1
        while in_flight:
            dealer.recv_multipart()
            in_flight -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=INTEGERS, default="1,8,64,512")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--paper-steps", type=int, default=5, help="number of steps of 8,192 trajectories")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    options = parser.parse_args()
    sizes = [1, 2] if options.quick else options.workers
    steps, repeats, groups = (3, 1, QUICK_GROUPS) if options.quick else (options.steps, options.repeats, GROUPS)
    rows: list[dict[str, Any]] = []
    print(f"{'':24} {'workers':>8} {'trajectories/s':>15} {'messages/s':>12} {'CPU ms each':>12}")
    for _ in range(repeats):
        cases = [("durable", size, groups, steps) for size in sizes]
        cases += [("fsync", sizes[len(sizes) // 2], groups, steps)]
        if not options.quick:
            cases += [("durable", size, PAPER_GROUPS, options.paper_steps) for size in sizes]
        for kind, workers, num_groups, num_steps in cases:
            fields = {"workers": workers, "steps": num_steps, "tokens": options.tokens, "groups": num_groups}
            with tempfile.TemporaryDirectory(prefix="areal-controller-") as folder:
                row = asyncio.run(serve(Path(folder), fsync=kind == "fsync", **fields))
            large = f", steps of {num_groups * GROUP_SIZE:,}" if num_groups == PAPER_GROUPS else ""
            rows.append({"kind": kind + large, **row})
            _print(rows[-1])
        rows.append({"kind": "bare", "workers": 1, **bare(options.tokens, 100 if options.quick else 20_000)})
        _print(rows[-1])
    if options.quick:
        print("the run completed, but was too short for meaningful figures")
        return
    facts = {"tokens": options.tokens, "steps": steps, "paper_steps": options.paper_steps}
    path = result_path("controller", options)
    print(f"written to {write('controller', command_of('controller'), {**facts, 'rows': rows}, path)}")


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['kind']:24} {row['workers']:8} {row['trajectories_per_s']:15,.0f} {row['messages_per_s']:12,.0f} "
        f"{row['cpu_ms_per_trajectory']:12.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
