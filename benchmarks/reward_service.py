"""How soon does the reward service recover after a faulty scorer, and do other requests continue meanwhile?

    python -m benchmarks.reward_service            about two minutes
    python -m benchmarks.reward_service --quick    about 40 seconds, one round; writes nothing

A separate service has two scoring processes and a spare; a client continuously sends normal requests of 5 ms. Then one
request hangs, segfaults, takes 8 GB (limit 1 GB), or forks 64 daemons. `recovery`: seconds from the faulty request's
deadline (for a crash: from its verdict) until the pool has all its processes again. `throughput`: verdicts per second
of normal requests before, and from the faulty request until the pool is complete. Exit status 1 if a recovery took
longer than LIMIT_S.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from areal_like.trajectory import Segment
from areal_like.transport.channel import Peer
from areal_like.transport.service_stats import ask_stats
from areal_like.wire.messages import SHARED_RUN, Heartbeat, Hello, SampleTask, Sampling
from benchmarks.runs import command_of, write
from rollout.reward_client import ACCEPT, RewardClient

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 2.0
LIMIT_S = 2.0
"""Longest recovery after the deadline, seconds."""
SCORER = """
import ctypes, os, time

def score(row, response, **info):
    if row["do"] == "hang":
        time.sleep(600)
    if row["do"] == "segfault":
        ctypes.string_at(0)
    if row["do"] == "leak":
        held = []
        for _ in range(8 * 64):
            held.append(os.urandom(1 << 20) * 16)
            time.sleep(0.001)
    if row["do"] == "fork":
        for _ in range(6):
            if os.fork() == 0:
                os.setsid()
        time.sleep(600)
    time.sleep(0.005)
    return 1.0
"""
SETTINGS: dict[str, Any] = {
    "scorers": [{"kind": "wild_scorer:score"}], "num_workers": 2, "num_spares": 1, "retries": 0, "cache_mb": 0,
    "max_memory_mb": 1024, "timeout_s": DEADLINE_S,
}  # fmt: skip
WILD = ("hang", "segfault", "leak", "fork")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reward_service", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one round, and no result file")
    is_quick = parser.parse_args().quick
    rounds = 1 if is_quick else 5
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), rounds))
    for do, found in result.items():
        worst, alone, during = max(found["recovery_s"]), min(found["alone_per_s"]), min(found["beside_per_s"])
        print(
            f"{do:9} whole again after {worst:.2f} s at most; honest answers {alone:.0f}/s alone, {during:.0f}/s during"
        )
    if not is_quick:
        fields = {"rounds": rounds, "deadline_s": DEADLINE_S, "limit_s": LIMIT_S, **result}
        print(f"written to {write('reward_service', command_of('reward_service'), fields)}")
    worst_s = max(seconds for found in result.values() for seconds in found["recovery_s"])
    raise SystemExit(0 if worst_s <= LIMIT_S else 1)


async def measure(folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Start the service and cause every kind of fault `rounds` times."""
    (folder / "wild_scorer.py").write_text(SCORER)
    (folder / "rewards.yaml").write_text(yaml.safe_dump({"reward": SETTINGS}))
    address_file = folder / "address"
    with address_file.open("wb") as out, (folder / "log").open("wb") as log:
        service = subprocess.Popen(  # noqa: ASYNC220  (the loop has nothing else to do yet)
            [sys.executable, "-P", "-m", "services.reward", "serve", "--config", str(folder / "rewards.yaml"),
             "--curve-dir", str(folder / "keys")],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONUNBUFFERED": "1"}, stdout=out,
            stderr=log,
        )  # fmt: skip
    try:
        while not address_file.read_text():
            assert service.poll() is None, "the service did not start"
            await asyncio.sleep(0.05)
        return await run_wild(address_file.read_text().strip(), folder / "keys", rounds)
    finally:
        service.terminate()
        service.wait(30)


async def run_wild(address: str, keys: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    hello = Hello(role="rollout", name="benchmark", pid=os.getpid(), run_id=SHARED_RUN, incarnation="1")
    peer = Peer(
        address=address, hello=hello, curve_dir=keys, audience="services", accept=ACCEPT,
        heartbeat_s=0.5, silence_s=15.0, status=lambda: Heartbeat(state="score"),
    )  # fmt: skip
    client = RewardClient([peer], name="benchmark", deadline_s=DEADLINE_S, total_deadline_s=120.0)
    result: dict[str, dict[str, list[float]]] = {}
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(client.run()), *(tasks.create_task(keep_asking(client)) for _ in range(4))]
        for do in WILD * rounds:
            await whole(address, keys)
            alone_per_s = await rate(client, 2.0)
            before, began_s = client.counters["verdict_scored"], time.monotonic()
            verdict = await client.score(task(do), "x", "stop", 1)
            assert not verdict.is_scored, f"{do}: {verdict}"
            from_s = began_s + DEADLINE_S if verdict.kind == "timed_out" else time.monotonic()
            whole_s = await whole(address, keys)
            during_per_s = (client.counters["verdict_scored"] - before) / (whole_s - began_s)
            found = result.setdefault(do, {"recovery_s": [], "alone_per_s": [], "beside_per_s": []})
            found["recovery_s"].append(round(max(whole_s - from_s, 0.0), 3))
            found["alone_per_s"].append(round(alone_per_s, 1))
            found["beside_per_s"].append(round(during_per_s, 1))
        for one in background:
            one.cancel()
    await client.close()
    return result


async def keep_asking(client: RewardClient) -> None:
    while True:
        await client.score(task("honest"), "x", "stop", 1)


async def rate(client: RewardClient, seconds: float) -> float:
    """Verdicts per second of normal requests, over this time."""
    before, began_s = client.counters.get("verdict_scored", 0.0), time.monotonic()
    await asyncio.sleep(seconds)
    return (client.counters["verdict_scored"] - before) / (time.monotonic() - began_s)


async def whole(address: str, keys: Path) -> float:
    """Wait until the pool has all its processes, and return that time."""
    full = SETTINGS["num_workers"] + SETTINGS["num_spares"]
    while (await ask_stats(address, curve_dir=keys)).counters["processes"] < full:  # noqa: ASYNC110  (it must be polled)
        await asyncio.sleep(0.02)
    return time.monotonic()


def task(do: str) -> SampleTask:
    return SampleTask(
        lease_id=1, group_id=1, sample_index=0, purpose="train", min_version=0, row={"do": do}, sampling=Sampling(),
        seed=1, prefix=Segment.empty(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
