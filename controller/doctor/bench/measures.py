"""`--bench`: short benchmarks of what a run depends on, one after the other, in less than half a minute.

Also checks whether the machine was busy. The reference is in reference.py, comparison in compare.py.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_like.errors import OperationError
from controller.doctor.bench import reference
from controller.doctor.bench.compare import Measure, judge
from controller.doctor.finding import Check, Finding, Line, ok
from controller.doctor.machine import Machine
from controller.doctor.runner import run_checks
from controller.doctor.topics.disk import nearest_folder
from controller.doctor.topics.processor import usable_cores

if TYPE_CHECKING:
    import zmq

TOPIC = "Benchmark"
REPEATS = 5
TOTAL_S = 28.0
BUSY_SHARE = 0.15
"""Share of all cores used by other programs above which slow results are not reported as warnings."""
SMALL_BYTES, LARGE_BYTES = 1024, 1 << 20
PIECE_S, SENDER_S = 0.25, 6
STARTS = 4
"""Number of process starts in one repeat."""
COPIED_BYTES = 65_536
"""Smaller messages are copied, which is cheaper than tracking them."""
WRITE_BYTES = 32 << 20
ENGINE_RESULT = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "engine.json"

Values = dict[str, list[float]]
PRODUCT_1 = Measure("product_1", "product, 1 thread", "GFLOP/s", 1e9)
PRODUCT_ALL = Measure("product_all", "product, all threads", "GFLOP/s", 1e9)
COPY = Measure("copy", "memory copy", "GB/s", 1e9)
MESSAGES = Measure("messages", "ZeroMQ, 1 kB", "messages/s")
STREAM = Measure("stream", "ZeroMQ, 1 MiB", "MB/s", 1e6)
WRITE = Measure(
    "write",
    "write and sync",
    "MB/s",
    1e6,
    advice="store runs on a faster disk, for example with runs_dir=/path/to/folder",
)
START = Measure(
    "start", "start of Python", "ms", 1e-3, is_time=True, advice="check the disk on which Python is installed"
)


def arithmetic(machine: Machine) -> Values:
    """FLOP/s of a 1024 x 1024 product in fp32, bytes/s of a copy in memory."""
    threads = max(1, math.floor(usable_cores(machine)))
    answer = machine.probe("arithmetic", str(threads), str(REPEATS), deadline_s=14)
    if not answer.data:
        raise OperationError(f"torch: {answer.fault}")
    return {key: list(answer.data[key]) for key in ("product_1", "product_all", "copy")}


def loopback(machine: Machine) -> Values:
    """Messages and bytes per second from another process over TCP on 127.0.0.1."""
    return {
        "messages": _received_per_s(machine, SMALL_BYTES),
        "stream": [rate * LARGE_BYTES for rate in _received_per_s(machine, LARGE_BYTES)],
    }


def _received_per_s(machine: Machine, num_bytes: int) -> list[float]:
    """Received messages of the given size per second, in each of several intervals."""
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    try:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        arguments = ("sender", str(port), str(num_bytes), str(SENDER_S))
        sender = threading.Thread(target=machine.probe, args=arguments, kwargs={"deadline_s": 10}, daemon=True)
        sender.start()
        socket.recv()
        rates = [_piece(socket, num_bytes) for _ in range(REPEATS + 1)][1:]
        socket.send(b"enough", zmq.NOBLOCK)
        sender.join(SENDER_S)  # the next measurement must not compete with this process
        return rates
    except zmq.Again as error:
        raise OperationError("messages over the loopback interface stopped arriving") from error
    finally:
        context.destroy(linger=0)


def _piece(socket: zmq.Socket[bytes], num_bytes: int) -> float:
    count, is_small, started_s = 0, num_bytes < COPIED_BYTES, time.perf_counter()
    while (wall_s := time.perf_counter() - started_s) < PIECE_S:
        for _ in range(100 if is_small else 1):
            socket.recv(0, copy=is_small)
        count += 100 if is_small else 1
    return count / wall_s


def disk(machine: Machine) -> Values:
    """Bytes per second written to the runs folder and forced to the disk."""
    payload, rates = os.urandom(WRITE_BYTES), []
    with tempfile.TemporaryDirectory(prefix=".areal_like-doctor-", dir=nearest_folder(machine.runs_dir)) as folder:
        for repeat in range(REPEATS):
            started_s = time.perf_counter()
            with open(Path(folder) / str(repeat), "wb", buffering=0) as file:
                file.write(payload)
                os.fsync(file.fileno())
            rates.append(WRITE_BYTES / (time.perf_counter() - started_s))
    return {"write": rates}


def start(machine: Machine) -> Values:
    """Seconds until an empty Python program has exited."""
    walls_s = []
    for _ in range(REPEATS + 1):
        started_s = time.perf_counter()
        for _ in range(STARTS):
            ran = machine.run([sys.executable, "-I", "-c", "pass"], deadline_s=5, is_guarded=False)
            if ran.fault:
                raise OperationError(f"python: {ran.fault}")
        walls_s.append((time.perf_counter() - started_s) / STARTS)
    return {"start": walls_s[1:]}


GROUPS: tuple[tuple[Callable[[Machine], Values], float, tuple[Measure, ...]], ...] = (
    (arithmetic, 15.0, (PRODUCT_1, PRODUCT_ALL, COPY)),
    (loopback, 12.0, (MESSAGES, STREAM)),
    (disk, 8.0, (WRITE,)),
    (start, 5.0, (START,)),
)
"""Function, deadline in seconds, measured quantities."""


def measure_all(machine: Machine, say: Callable[[Sequence[str]], None] = lambda names: None) -> list[Line]:
    """Run all measurements one after the other; a failure or timeout is reported, and the next one runs."""
    started_s = time.monotonic()
    busy = busy_share()
    lines = [Line(TOPIC, "compared with", _reference_words(busy), time.monotonic() - started_s)]
    for look, deadline_s, measures in GROUPS:
        left_s = min(deadline_s, TOTAL_S - (time.monotonic() - started_s))
        lines += _group(machine, say, look, left_s, measures, is_busy=busy > BUSY_SHARE)
    return lines


def _group(
    machine: Machine, say: Callable[[Sequence[str]], None], look: Callable[[Machine], Values], left_s: float,
    measures: tuple[Measure, ...], *, is_busy: bool,
) -> list[Line]:  # fmt: skip
    values: Values = {}

    def check(machine: Machine) -> Finding:
        values.update(look(machine))
        return ok("")

    whole = run_checks([Check(TOPIC, measures[0].name, check, deadline_s=max(left_s, 0.0))], machine, say)[0]
    if whole.finding.verdict != "ok":
        return [whole]
    return [Line(TOPIC, m.name, judge(m, values[m.key], is_busy=is_busy), whole.wall_s) for m in measures]


def busy_share(look_s: float = 0.5) -> float:
    """Share of all cores used by other programs during a short wait."""
    import psutil

    return float(psutil.cpu_percent(interval=look_s)) / 100


def _reference_words(busy: float) -> Finding:
    words = f"{reference.text()}; median of {REPEATS} (lowest to highest), x: times as fast"
    if found := engine_speed():
        words += (
            f"; the embedded engine made {found.tokens_per_s:,.0f} tokens/s with the quickstart's model on one thread "
            f"({found.machine})"
        )
    if busy > BUSY_SHARE:
        words += f". Other programs use {busy:.0%} of the cores now: this may lower the figures"
    return ok(words, busy_share=busy, date=reference.DATE, machine=dict(reference.MACHINE))


@dataclass(frozen=True)
class EngineSpeed:
    """Result of the committed engine benchmark with 128 slots: tokens/s, machine and date."""

    tokens_per_s: float
    machine: str


def engine_speed() -> EngineSpeed | None:
    """The engine's speed; None if that result is not available. Its machine may differ from the reference's, because
    both are measured separately.
    """
    try:
        result = json.loads(ENGINE_RESULT.read_text())
        best = max(float(case["tokens_per_s"]["embedded"]["median"]) for case in result["cases"])
        return EngineSpeed(best, f"{result['machine']['cpu']}, {result['date'][:10]}")
    except (OSError, ValueError, KeyError, TypeError):
        return None
