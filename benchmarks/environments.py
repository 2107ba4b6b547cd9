"""Do 2,000 concurrent episodes lose anything when processes below them are killed, and what do their steps cost?

    python -m benchmarks.environments            some minutes
    python -m benchmarks.environments --quick    300 episodes; writes nothing

A reward service has four environment processes. A client begins all episodes before any of them continues, and then
plays TURNS turns of each concurrently. `alone`: without faults. `killed`: environment processes get SIGKILL at random
times, at most KILL_S apart while all of them run, and once the service itself, which is restarted at the same address.
`wild`: of every fifty episodes one hangs, one kills its process, one returns NaN as its reward, one allocates too much
memory, one returns a text for `done`, one floods its output and its observation, and one leaves files open.
`benchmarks.killed_runs` kills the processes of complete runs.

An episode is lost if its rewards or observations differ from those of the phase `alone`, or, if it is wild, if its
verdict does not have the kind that belongs to its fault. `step_p50_s`, `step_p99_s`: from request to answer, replays
included. Exit status 1 if an episode was lost or a process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from areal_like.errors import OperationError
from areal_like.trajectory import Segment
from areal_like.transport.channel import Peer
from areal_like.transport.service_stats import ask_stats
from areal_like.wire.messages import SHARED_RUN, Heartbeat, Hello, SampleTask, Sampling
from benchmarks.runs import command_of, write
from rollout.reward_client import ACCEPT, RewardClient

ROOT = Path(__file__).resolve().parents[1]
TURNS, PROCESSES, KILL_S, THINK_S = 8, 4, 2.0, 1.0
"""THINK_S: longest pause of an episode between two turns, which simulates generation."""
HANG_S = 3600.0
ENVIRONMENT = '''
import os, random, time

class Walk:
    """A random walk controlled by its actions; every answer depends on all earlier ones."""

    def reset(self, row, seed):
        self.do, self.rng, self.place = row["do"], random.Random(seed * 1000 + row["number"]), 0
        self.mood = random.Random(row["number"])
        return str(self.place)

    def step(self, action):
        self.place = self.place * 31 + len(action) + self.rng.randrange(10**6)
        if self.do and self.mood.random() < 0.3:
            if self.do == "hang":
                time.sleep(600)
            if self.do == "die":
                os._exit(3)
            if self.do == "memory":
                self.held = bytearray(os.urandom(1 << 20)) * 96
            if self.do == "invalid":
                return "", float("nan"), False
            if self.do == "lie":
                return "", 0.0, "not yet"
            if self.do == "flood":
                print("x" * 10**7)
                return "x" * 10**6, 0.0, False
            if self.do == "files":
                self.files = [open(os.devnull) for _ in range(100)]
        return str(self.place % 10**9), self.place % 7 / 7, False
'''
SETTINGS: dict[str, Any] = {
    "scorers": [],
    "environment": {
        "kind": "walk_environment:Walk", "num_processes": PROCESSES, "step_timeout_s": 2.0, "retries": 1,
        "max_episode_memory_mb": 64,
    },
}  # fmt: skip
WILD = {
    "hang": "timed_out", "die": "crashed", "invalid": "invalid", "memory": "crashed", "lie": "invalid",
    "flood": "invalid", "files": "crashed",
}  # fmt: skip
"""Verdict kind of each fault that an episode causes in its process."""
WILD_EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.environments", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="300 episodes, and no result file")
    is_quick = parser.parse_args().quick
    num = 300 if is_quick else 2000
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), num))
    for phase, found in result.items():
        print(
            f"{phase:7} {found['lost']} of {num} episodes lost, {found['steps_per_s']:.0f} steps/s, a step "
            f"{found['step_p50_s']:.3f} s (p99 {found['step_p99_s']:.2f} s), {found['kills']} kills, "
            f"{found['replayed']} calls replayed"
        )
    if not is_quick:
        fields = {"episodes": num, "turns": TURNS, "processes": PROCESSES, "phases": result}
        print(f"written to {write('environments', command_of('environments'), fields)}")
    raise SystemExit(0 if not any(found["lost"] or found["left"] for found in result.values()) else 1)


class Service:
    """The service process at one address, restarted after it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None
        (folder / "walk_environment.py").write_text(ENVIRONMENT)
        (folder / "rewards.yaml").write_text(yaml.safe_dump({"reward": SETTINGS}))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.seen: set[int] = set()
        """Process ids of all its descendants, past and present."""

    async def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220  (the loop has nothing else to do)
                [sys.executable, "-P", "-m", "services.reward", "serve", "--config", str(self.folder / "rewards.yaml"),
                 "--curve-dir", str(self.folder / "keys"), "--bind", self.address],
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}"}, stdout=log, stderr=log,
            )  # fmt: skip
        while not (self.folder / "keys" / "server.secret").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await self.counters()

    async def counters(self) -> dict[str, float]:
        """Its statistics; waits until it answers."""
        assert self.process is not None
        async with asyncio.timeout(HANG_S):
            while self.process.poll() is None:
                with contextlib.suppress(OperationError):  # it is starting, or busy
                    return (await ask_stats(self.address, curve_dir=self.folder / "keys")).counters
        raise SystemExit(f"the service has ended:\n{(self.folder / 'log').read_text()[-4000:]}")

    async def all_running(self) -> None:
        """Wait until all environment processes take episodes."""
        while (await self.counters()).get("environment.processes", 0) < PROCESSES:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    def children(self) -> list[int]:
        """Process ids of the running environment processes."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
            self.seen.update(found)
            return found
        return []

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def left(self) -> int:
        """Number of processes that remain after the service has ended."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)
        return sum(psutil.pid_exists(pid) for pid in self.seen)


async def measure(folder: Path, num: int) -> dict[str, dict[str, Any]]:
    """Run every phase with a separate service; the phase `alone` gives the expected values."""
    phases: dict[str, dict[str, Any]] = {}
    right: list[list[str]] = []
    for phase in ("alone", "killed", "wild"):
        own = folder / phase
        own.mkdir()
        service = Service(own)
        await service.start()
        service.children()
        phases[phase], seen = await run_phase(service, phase, num)
        right = right or seen
        phases[phase]["lost"] = sum(
            is_lost(fault_of(number, phase), one, right[number]) for number, one in enumerate(seen)
        )
        for number, one in enumerate(seen):
            if is_lost(fault_of(number, phase), one, right[number]):
                print(f"lost in {phase}: {number} {fault_of(number, phase)!r} saw {one}, not {right[number]}")
        phases[phase]["left"] = service.left()
    return phases


def fault_of(number: int, phase: str) -> str:
    """The fault that an episode causes in its process; empty for most."""
    kinds = list(WILD)
    return kinds[number % WILD_EVERY] if phase == "wild" and number % WILD_EVERY < len(kinds) else ""


def is_lost(fault: str, seen: list[str], right: list[str]) -> bool:
    """Whether an episode is lost. A wild one may also have ended before it caused its fault."""
    return seen != right and not (fault and seen[-1] == WILD[fault] and seen[:-1] == right[: len(seen) - 1])


async def run_phase(service: Service, phase: str, num: int) -> tuple[dict[str, Any], list[list[str]]]:
    hello = Hello(role="rollout", name=phase, pid=os.getpid(), run_id=SHARED_RUN, incarnation="1")
    peer = Peer(
        address=service.address, hello=hello, curve_dir=service.folder / "keys", audience="services", accept=ACCEPT,
        heartbeat_s=0.5, silence_s=30.0, status=lambda: Heartbeat(state="play"),
    )  # fmt: skip
    client = RewardClient([peer], name=phase, deadline_s=HANG_S, total_deadline_s=HANG_S, silence_s=10.0, seed=1)
    waits: list[float] = []
    all_begun = asyncio.Event()
    begun = Counter[str]()

    async def play(number: int) -> list[str]:
        """Observation and reward of each turn; the last entry is the verdict's kind if the episode failed."""
        rng = np.random.default_rng(number)
        seen = []
        async with client.environments.episode(task(number, fault_of(number, phase))) as episode:
            step = await episode.reset()
            begun["episodes"] += 1
            if begun["episodes"] == num:
                all_begun.set()
            await all_begun.wait()
            for turn in range(TURNS):
                await asyncio.sleep(rng.uniform(0, THINK_S))
                began_s = time.monotonic()
                step = await episode.step("x" * (turn + number % 5))
                waits.append(time.monotonic() - began_s)
                if step is None:
                    assert episode.failure is not None
                    return [*seen, episode.failure.kind]
                seen.append(f"{step.observation} {step.reward}")
        return seen

    running = asyncio.create_task(client.run())
    disturbing = asyncio.create_task(disturb(service, all_begun)) if phase == "killed" else None
    began_s = time.monotonic()
    seen = await asyncio.gather(*(play(number) for number in range(num)))
    wall_s = time.monotonic() - began_s
    kills = await stopped(disturbing) if disturbing is not None else 0
    counters = await service.counters()
    running.cancel()
    await client.close()
    service.children()
    found = {
        "steps_per_s": round(len(waits) / wall_s, 1), "step_p50_s": round(float(np.percentile(waits, 50)), 4),
        "step_p99_s": round(float(np.percentile(waits, 99)), 3), "kills": kills,
        "replayed": int(counters.get("environment.replayed", 0)), "moved": int(counters.get("environment.moved", 0)),
        "failed": sum(one[-1] in WILD.values() for one in seen),
    }  # fmt: skip
    return found, list(seen)


_num_kills = Counter[str]()


async def disturb(service: Service, all_begun: asyncio.Event) -> None:
    """Send SIGKILL to one environment process after another, and in the second round to the service."""
    dice = random.Random(1)
    await all_begun.wait()
    for turn in itertools.count():
        await service.all_running()  # processes that are killed during their start would count as failed starts
        await asyncio.sleep(dice.uniform(0, KILL_S))
        if turn == 1:
            service.kill()
            _num_kills["service"] += 1
            await service.start()
        elif pids := service.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(pids), signal.SIGKILL)
                _num_kills["process"] += 1


async def stopped(disturbing: asyncio.Task[None]) -> int:
    """Stop the disturbance and return the number of kills."""
    disturbing.cancel()
    await asyncio.wait({disturbing})
    if not disturbing.cancelled() and (error := disturbing.exception()) is not None:
        raise error
    return sum(_num_kills.values())


def task(number: int, fault: str) -> SampleTask:
    return SampleTask(
        lease_id=number, group_id=number // 8, sample_index=number % 8, purpose="train", min_version=0,
        row={"do": fault, "number": number}, sampling=Sampling(), seed=1, prefix=Segment.empty(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
