"""How long does a new version take to reach a generating engine by each way, and how does it affect generation?

    python -m benchmarks.weight_transfer                            every way at 50, 200 and 500 MB
    python -m benchmarks.weight_transfer --quick                    8 and 24 MB, one repeat
    python -m benchmarks.weight_transfer --device cuda --shape 4B   a real size on a GPU, bfloat16

The trainer's side (copy, store, sender) runs in a separate process; the receiver and the real embedded engine with all
slots busy run in this one, on one machine. A stream is sent over loopback, encrypted; a process group communicates over
loopback, unencrypted. Versions differ from each other in `--changed` of their items, by one unit in the last place.
Generation is timed in its own thread, by a timestamp after each token step, so that waits of the measuring loop are not
counted. Columns, medians of the repeats:

    copy_ms    the trainer is blocked        write_ms   its background work until the announcement
    stage_ms   from the announcement until the engine is ready to swap; `distributed`: until the group has met
    swap_ms    generation is paused, as reported by the engine (keep_kv: no cache is rebuilt); for `distributed` it
               includes the transfer and its checks
    seen_ms    the time without a step around the swap, minus the usual step; allowed: 1.2 * swap_ms + 20
    worst_ms   the longest other time without a step, from the announcement on, minus the usual step: nothing blocks
               generation then, but four busy threads share this machine's cores
    slow       mean step while the version is staged, over the usual one, for the same reason
    refill_ms  swap_ms with `recompute` minus swap_ms: caches are rebuilt
    sent_mb    bytes sent by the trainer (for shm and disk: bytes of the files it wrote)

A row whose seen_ms is more than allowed is marked `over`. In addition, the machine's own limits are measured: copying
memory, and plain TCP over loopback, for as many bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.process import die_with_starter
from areal_like.trajectory import Segment
from areal_like.transport.channel import Peer
from areal_like.transport.credentials import make_run_credentials
from areal_like.weights.weight_store import SHARED_MEMORY
from areal_like.wire.messages import Heartbeat, Hello, Sampling
from benchmarks.gpu_suite.shapes import SHAPES, Shape, config_of, random_tensors
from benchmarks.measured import NUMBERS
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
from rollout.config import EngineSettings, Interruption
from rollout.engine.port import GenerationRequest
from rollout.weights.port import JoinAs
from rollout.weights.receiver import VersionReceiver
from rollout.weights.relay import Relay

RUN = "weight-transfer"
WAYS: dict[str, dict[str, Any]] = {
    "shm": {"kind": "shm"},
    "disk": {"kind": "disk"},
    "disk, delta": {"kind": "disk", "delta": {"full_every": 1000}},
    "stream": {"kind": "stream"},
    "stream, delta": {"kind": "stream", "delta": {"full_every": 1000}},
    "distributed": {"kind": "distributed", "group": {"gather_s": 0.1}},
}
DEADLINE_S = 300.0
REST_S = 0.5
MIN_STEPS = 5
"""Smallest number of undisturbed steps before each version, which give the usual step."""
MAX_STAMPS = 1 << 20


@dataclass(frozen=True)
class Case:
    """One way at one size."""

    way: str
    shape: Shape
    dtype: str
    device: str
    changed: float
    repeats: int
    refills: int
    """Repeats with `recompute`, which rebuilds every cache; for the largest size each takes seconds."""
    slots: int

    @property
    def num_bytes(self) -> int:
        """Parameters times bytes per item."""
        return self.shape.parameters * (4 if self.dtype == "float32" else 2)


def shape_of(megabytes: float) -> Shape:
    """The Qwen3 model of eight layers whose size is closest to `megabytes` in float32."""
    widths = range(64, 4096, 64)
    shapes = [Shape(f"{megabytes:g} MB", w, 8, w // 32, w // 64, 32, 3 * w, 2048) for w in widths]
    return min(shapes, key=lambda shape: abs(shape.parameters * 4 - megabytes * 1e6))


# ------------------------------------------------------------ the trainer's half


def trainer(pipe: Connection, case: Case, folder: str) -> None:
    """Process of the trainer's side: makes versions on request, serves them if they are streamed, reports its times."""
    die_with_starter(os.getppid())
    asyncio.run(_trainer(pipe, case, Path(folder)))


async def _trainer(pipe: Connection, case: Case, folder: Path) -> None:
    import torch

    from trainer.config import WeightStoreSettings
    from trainer.weights.group_rounds import GroupRounds
    from trainer.weights.publish import tensor_bytes
    from trainer.weights.sender import WeightSender
    from trainer.weights.version_writer import VersionWriter

    torch.set_num_threads(1)
    settings = WeightStoreSettings(**WAYS[case.way])
    tensors = random_tensors(config_of(case.shape), "cpu", getattr(torch, case.dtype))
    views = [tensor.view(torch.int32 if case.dtype == "float32" else torch.int16) for tensor in tensors.values()]
    root = (SHARED_MEMORY if settings.place == "shm" else folder) / f"areal_like-{RUN}-{os.getpid()}"
    writer, dice = VersionWriter(root, settings), torch.Generator().manual_seed(1)
    sender = WeightSender(
        root, run_id=RUN, bind="tcp://127.0.0.1:*", curve_dir=folder / "keys",
        chunk_bytes=settings.chunk_kb << 10, fan_out=settings.fan_out,
        make_rounds=None if not settings.transfer.needs_process_group else lambda send: GroupRounds(
            settings.group, run_id=RUN, host="127.0.0.1", device="cpu", send=send
        ),
    )  # fmt: skip
    await sender.start()
    serving = asyncio.create_task(sender.run())
    try:
        while (version := await asyncio.to_thread(pipe.recv)) is not None:
            for view in views:
                view += (torch.rand(view.shape, generator=dice) < case.changed).to(view.dtype)
            started_s = time.perf_counter()
            copies = {name: tensor_bytes(tensor.clone()) for name, tensor in tensors.items()}
            copied_s = time.perf_counter()
            written = await asyncio.to_thread(writer.write, version, "l0", copies)
            ended_s = time.perf_counter()
            place = str(written.path)
            if settings.transfer.sender:
                place = await sender.publish(written.path, version, "l0")
            pipe.send((place, copied_s - started_s, ended_s - copied_s, written.num_bytes))
    finally:
        serving.cancel()
        await sender.close()
        shutil.rmtree(root, ignore_errors=True)


# ------------------------------------------------------------ the engine's half


class Steps:
    """Records when the engine's own thread finished each token step, and when it swapped."""

    def __init__(self, core: Any) -> None:
        self.stamps_s: deque[float] = deque(maxlen=MAX_STAMPS)
        self.swapped_s = 0.0
        self._step, self._swap = core.step, core.swap
        core.step, core.swap = self._timed_step, self._timed_swap

    def _timed_step(self) -> None:
        self._step()
        self.stamps_s.append(time.perf_counter())

    def _timed_swap(self, *given: Any) -> None:
        self.swapped_s = time.perf_counter()
        self._swap(*given)

    def gaps_s(self, from_s: float, to_s: float) -> list[tuple[float, float, float]]:
        """(length, begin, end) of the intervals between steps that ended within a period."""
        stamps = list(self.stamps_s)
        return [(late - early, early, late) for early, late in itertools.pairwise(stamps) if from_s <= late <= to_s]


class Generation:
    """Context manager that keeps every slot busy."""

    def __init__(self, engine: Any, case: Case) -> None:
        self._engine, self._case, self._tasks = engine, case, list[asyncio.Task[None]]()

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._answers(slot)) for slot in range(self._case.slots)]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _answers(self, slot: int) -> None:
        number = slot
        while True:
            prompt = np.random.default_rng(number).integers(0, self._case.shape.vocabulary, 16).astype(np.int32)
            await self._engine.generate(
                GenerationRequest(
                    request_id=number,
                    prompt_P=prompt,
                    prefix=Segment.empty(),
                    seed=number,
                    sampling=Sampling(max_new_tokens=400),
                )
            )
            number += self._case.slots


class Bench:
    """One case: a trainer process, a receiver, an engine."""

    def __init__(self, case: Case, folder: Path, pipe: Connection) -> None:
        self._case, self._folder, self._pipe = case, folder, pipe
        self._version = -1

    async def run(self) -> dict[str, Any]:
        """Measure the row of this case."""
        from rollout.engine.embedded import EmbeddedEngine

        case = self._case
        model = self._folder / "model"
        config_of(case.shape, max_positions=512).save_pretrained(model)
        settings = EngineSettings(num_slots=case.slots, max_context=512, device=case.device)
        self._engine = EmbeddedEngine(model, settings, dtype=case.dtype, num_threads=1)
        self._receiver = self._make_receiver()
        await self._engine.start()
        gc.collect()
        gc.freeze()  # as every rollout worker does after its start (areal_like.process.freeze_heap)
        serving = asyncio.create_task(self._receiver.run())
        try:
            await self._bring("keep_kv")
            async with Generation(self._engine, case):
                steps = Steps(self._engine._core)
                swaps = [await self._measure(steps, "keep_kv") for _ in range(case.repeats)]
                refills = [await self._measure(steps, "recompute") for _ in range(case.refills)]
        finally:
            serving.cancel()
            await self._engine.close()
            await self._receiver.close()
        row = {key: statistics.median(swap[key] for swap in swaps) for key in swaps[0]}
        allowed_ms = 1.2 * row["swap_ms"] + 20
        refill_ms = max(0.0, statistics.median(refill["swap_ms"] for refill in refills) - row["swap_ms"])
        is_within = row["seen_ms"] <= allowed_ms
        return {**row, "refill_ms": refill_ms, "allowed_ms": allowed_ms, "is_within": is_within, "each": swaps}

    def _make_receiver(self) -> VersionReceiver:
        keys, incarnation = self._folder / "keys", secrets.token_hex(8)

        def wire(address: str, accept: frozenset[type]) -> Peer:
            hello = Hello(role="rollout", name="rollout-0", pid=os.getpid(), run_id=RUN, incarnation=incarnation)
            return Peer(
                address=address, hello=hello, curve_dir=keys, audience="services", accept=accept,
                heartbeat_s=0.5, silence_s=15.0, status=lambda: Heartbeat(state="fetch"),
            )  # fmt: skip

        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else self._folder
        return VersionReceiver(
            [root / f"areal_like-{RUN}-{os.getpid()}"],
            make_wire=wire,
            make_relay=lambda: Relay(run_id=RUN, bind="tcp://127.0.0.1:*", curve_dir=keys),
        )

    async def _bring(self, interruption: Interruption) -> dict[str, float]:
        """Transfer the next version from the trainer's tensors into the engine."""
        self._version += 1
        self._pipe.send(self._version)
        place, copy_s, write_s, written_bytes = await asyncio.to_thread(self._pipe.recv)
        before = self._receiver.counters().get("weights_fetched_bytes", 0.0)
        started_s = time.perf_counter()
        call = await self._receiver.meet(place, DEADLINE_S, JoinAs(1, "cpu"))
        if call is not None:
            arrived_s = time.perf_counter()
            report = await self._engine.load_from_group(call, interruption)
        else:
            manifest = await self._receiver.receive(place, DEADLINE_S)
            arrived_s = time.perf_counter()
            report = await self._engine.load_version(manifest, interruption)
        fetched = self._receiver.counters().get("weights_fetched_bytes", 0.0) - before
        assert self._engine.version == self._version, "another version was loaded"
        return {
            "copy_ms": 1e3 * copy_s, "write_ms": 1e3 * write_s,
            "stage_ms": 1e3 * (arrived_s - started_s + report.stage_s), "swap_ms": 1e3 * report.pause_s,
            "sent_mb": (fetched or written_bytes) / 1e6, "announced_s": started_s,
        }  # fmt: skip

    async def _measure(self, steps: Steps, interruption: Interruption) -> dict[str, float]:
        rests_s = time.perf_counter()
        await asyncio.sleep(REST_S)
        while len(rest := steps.gaps_s(rests_s, time.perf_counter())) < MIN_STEPS:  # first caches are built
            assert time.perf_counter() - rests_s < DEADLINE_S, "generation makes no progress"
            await asyncio.sleep(0.1)
        usual_s = statistics.median(length for length, _, _ in rest)
        row = await self._bring(interruption)
        await asyncio.sleep(0.1 + 3 * usual_s)
        gaps = steps.gaps_s(row.pop("announced_s"), time.perf_counter())
        around = [length for length, begin, end in gaps if begin <= steps.swapped_s <= end]
        others = [length for length, begin, end in gaps if not begin <= steps.swapped_s <= end]
        staging = [length for length, _, end in gaps if end < steps.swapped_s]
        return {
            **row, "usual_ms": 1e3 * usual_s,
            "seen_ms": 1e3 * max(0.0, max(around) - usual_s),
            "worst_ms": 1e3 * max(0.0, max(others, default=0.0) - usual_s),
            "slow": statistics.mean(staging) / usual_s if staging else 1.0,
        }  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """Measure one row."""
    with tempfile.TemporaryDirectory(prefix="areal-like-transfer-") as folder:
        make_run_credentials(Path(folder) / "keys")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=trainer, args=(theirs, case, folder), daemon=True)
        process.start()
        try:
            row = asyncio.run(Bench(case, Path(folder), ours).run())
        finally:
            ours.send(None)
            process.join(20)
            process.terminate()
    return {"way": case.way, "mb": case.num_bytes / 1e6, "dtype": case.dtype, "changed": case.changed, **row}


# ------------------------------------------------------------ what the machine can do


def limits(num_bytes: int) -> dict[str, float]:
    """Milliseconds to copy this many bytes in memory, and to send them over plain loopback TCP; best of three."""
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    copies, sends = [], []
    for _ in range(3):
        started_s = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - started_s)
        sends.append(_loopback(source, target))
    return {"memory_copy_ms": 1e3 * min(copies), "loopback_ms": 1e3 * min(sends)}


def _loopback(source: np.ndarray, target: np.ndarray) -> float:
    with _pair() as (one, other):
        sending = threading.Thread(target=one.sendall, args=(source.data,))
        started_s = time.perf_counter()
        sending.start()
        rest = target.data.cast("B")
        while len(rest):
            rest = rest[other.recv_into(rest) :]
        sending.join()
        return time.perf_counter() - started_s


@contextlib.contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


# ------------------------------------------------------------ the table

COLUMNS = (
    "copy_ms", "write_ms", "stage_ms", "swap_ms", "seen_ms", "worst_ms", "allowed_ms", "slow", "refill_ms", "usual_ms",
    "sent_mb",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="instead of sizes: a Qwen3 model by name, bfloat16")
    parser.add_argument("--ways", default=",".join(WAYS).replace(", ", "+"), help="comma-separated; + before delta")
    parser.add_argument("--sizes", type=NUMBERS, help="MB, comma-separated")
    parser.add_argument("--changed", type=float, default=0.01, help="share of items that differ between versions")
    parser.add_argument("--out", type=Path, default=None)
    add_replace(parser)
    options = parser.parse_args()
    path = options.out or (None if options.quick else result_path("weight_transfer", options))
    if options.shape:
        shapes, dtype = [SHAPES[options.shape]], "bfloat16"
    else:
        sizes = options.sizes or ([8.0, 24.0] if options.quick else [50.0, 200.0, 500.0])
        shapes, dtype = [shape_of(size) for size in sizes], "float32"
    ways = [way.replace("+", ", ") for way in options.ways.split(",")]
    if unknown := set(ways) - set(WAYS):
        raise SystemExit(f"no way {', '.join(unknown)}; there are {', '.join(WAYS)}")
    repeats, refills = (1, 1) if options.quick else (5, 2)
    command = command_of("weight_transfer")
    rows: list[dict[str, Any]] = []
    machine: list[dict[str, float]] = []
    print("  ".join([f"{'way':14}", f"{'MB':>7}", *(f"{name:>10}" for name in COLUMNS)]), flush=True)
    for shape in shapes:
        for way in ways:
            case = Case(way, shape, dtype, options.device, options.changed, repeats, refills, slots=4)
            row = measure(case)
            rows.append(row)
            figures = "  ".join(f"{row[name]:10.1f}" for name in COLUMNS)
            print(f"{way:14}  {row['mb']:7.1f}  {figures}{'' if row['is_within'] else '  over'}", flush=True)
        machine.append({"mb": case.num_bytes / 1e6, **limits(case.num_bytes)})
        print("  this machine: " + ", ".join(f"{key} {value:.1f}" for key, value in machine[-1].items()), flush=True)
        if not options.quick or options.out:  # after each size: the largest takes minutes
            print("written to", write("weight_transfer", command, {"rows": rows, "limits": machine}, path))


if __name__ == "__main__":
    main()
