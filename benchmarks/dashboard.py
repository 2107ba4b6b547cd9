"""What does a live page cost? A run of 5,000 steps with 20 viewers, while steps and pulses are appended.

    python -m benchmarks.dashboard                       some minutes
    python -m benchmarks.dashboard --minutes 5 --viewers 50
    python -m benchmarks.dashboard --quick               a short run and few viewers; writes nothing

The rows are synthetic, with the fields of a run of eight rollout workers, and written by the run's own writers
(journal, status file). `areal-like dashboard` runs in a separate process. Its processor time is measured while all
viewers are connected, from one minute after the last one has connected. The target is at most 1 % of one core. The
first page is that of a new server: HTML shell, scripts and the complete content.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from areal_like.guard import tied
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, environment, write
from controller.run_folder.run_folder import RunFolder
from controller.telemetry.journal import Journal
from controller.telemetry.status import StatusFile

GROUPS, WORKERS = 64, 8
PULSE_S = 10.0
WARM_S = 60.0
LIMIT = 0.01
ASSETS = ("palette.css", "report.css", "dashboard.css", "plotly.js", "report.js", "dashboard.js", "run.js",
          "samples.js", "actions.js")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=2.0, help="seconds between two appended steps")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    options = parser.parse_args()
    steps, viewers, minutes, warm_s = (
        (50, 2, 0.05, 0.0) if options.quick else (options.steps, options.viewers, options.minutes, WARM_S)
    )
    with tempfile.TemporaryDirectory() as place:
        run = GrowingRun(Path(place), steps, options.step_s)
        server = Server(Path(place))
        try:
            result = asyncio.run(measure(run, server, viewers, minutes, warm_s))
        finally:
            server.end()
    for name, value in result.items():
        print(f"{name:20} {value}")
    if options.quick:
        print("the run completed, but was too short for meaningful figures")
        return
    path = result_path("dashboard", options)
    found = {"steps": steps, "viewers": viewers, "step_s": options.step_s, "minutes": minutes, "limit": LIMIT, **result}
    print(f"written to {write('dashboard', command_of('dashboard'), found, path)}")
    raise SystemExit(0 if result["share_of_core"] < LIMIT else 1)


class GrowingRun:
    """A run folder with a given number of steps, to which more are appended."""

    def __init__(self, runs_dir: Path, steps: int, step_s: float) -> None:
        self.folder = RunFolder.create(runs_dir, "long")
        self.folder.write_state("running")
        settings = {"num_steps": 2 * steps, "staleness": {"max_staleness": 4}, "sampling": {"max_new_tokens": 8192}}
        self.folder.config.write_text(yaml.safe_dump(settings))
        self._journal = Journal(self.folder.metrics)
        self._status = StatusFile(self.folder.status, run="long", num_steps=2 * steps)
        self._step_s, self._began_s, self.step = step_s, time.time() - steps * step_s, 0
        self._pulsed_s = 0.0
        for _ in range(steps):
            self.append(self._began_s + self.step * step_s)

    def append(self, time_s: float) -> None:
        """Append the next step, and a pulse if one is due."""
        self.step += 1
        self._journal.append(step_row(self.step, time_s, self._step_s))
        if self.step % 50 == 0:
            accuracy = 0.9 - 0.6 * math.exp(-self.step / 900)
            self._journal.append({"kind": "eval", "time_s": time_s, "version": self.step, "accuracy": accuracy})
        if time_s - self._pulsed_s >= PULSE_S:
            self._pulsed_s = time_s
            self._journal.append(pulse(time_s, time_s - self._began_s))

    def report(self) -> None:
        """Write status.json, as a controller does every second."""
        row = pulse(time.time(), time.time() - self._began_s)
        self._status.write("running", step=self.step, processes=row["processes"], waits=row["waits"], eta_s=60.0)


def step_row(step: int, time_s: float, step_s: float) -> dict[str, Any]:
    """A step with the fields that charts use, each with a different number."""
    wave, trend = math.sin(step / 7), 1 - math.exp(-step / 900)
    names = ("loss", "kl_behaviour_proximal", "kl_proximal_current", "clip_fraction", "weight_mean", "grad_norm",
             "publish_s", "trainer_wait_share", "cut_share", "turns_mean", "lr", "skipped_updates")  # fmt: skip
    return {
        "kind": "step", "step": step, "time_s": time_s, "wall_s": step * step_s, "version": step,
        "reward_mean": 0.2 + 0.6 * trend + 0.05 * wave, "reward_std": 0.4, "groups": GROUPS, "entropy": 1.2 - trend,
        "staleness": [(step + group) % 4 for group in range(GROUPS)], "staleness_mean": 1.5 + 0.3 * wave,
        "staleness_max": 3, "ess": 0.9 + 0.05 * wave, "weight_max": 2.0 + wave, "grad_norm_max": 0.7 + 0.2 * wave,
        "response_len_mean": 900 + 300 * trend, "response_len_p50": 800.0 + wave, "response_len_p99": 4000.0 + wave,
        "response_len_max": 8192.0, "step_s": 0.8 * step_s, "samples_per_s": 250 + 9 * wave,
        "trainer_tokens_per_s": 210_000 + 4000 * wave, "rollout_tokens_per_s": 220_000 - 4000 * wave,
        "num_samples": 512, "num_sampled_tokens": 460_000.0, **{name: 0.1 + 0.01 * wave for name in names},
    }  # fmt: skip


def pulse(time_s: float, elapsed_s: float) -> dict[str, Any]:
    """A pulse with every process and its counters."""

    def process(role: str, name: str, **counters: float) -> dict[str, Any]:
        return {"role": role, "state": "running", "pid": 1, "incarnation": f"{name}-1", "rss_mb": 900.0,
                "counters": {"cpu_s": 0.9 * elapsed_s, **counters}}  # fmt: skip

    busy = {"busy_s": 0.7 * elapsed_s, "wait_score_s": 0.1 * elapsed_s, "wait_work_s": 0.15 * elapsed_s}
    processes = {
        f"rollout-{n}": process("rollout", f"rollout-{n}", tokens=1e4 * elapsed_s, **busy) for n in range(WORKERS)
    }
    processes["trainer"] = process("trainer", "trainer", busy_s=0.8 * elapsed_s, wait_s=0.2 * elapsed_s)
    processes["reward"] = process("reward", "reward", scored=250 * elapsed_s, queue=3, busy_workers=2)
    processes["controller"] = process("controller", "controller")
    waits = ["trainer waits for batch 7: 60 of 64 groups ready"]
    return {"kind": "pulse", "time_s": time_s, "wall_s": elapsed_s, "waits": waits, "processes": processes,
            "counts": {"running": 70, "ready": 12}}  # fmt: skip


class Server:
    """`areal-like dashboard` over a folder, in a separate process."""

    def __init__(self, runs_dir: Path) -> None:
        command = [sys.executable, "-P", "-m", "controller", "dashboard", str(runs_dir), "--port", "0"]
        self._process = subprocess.Popen(tied(command), stdout=subprocess.PIPE, text=True, env=environment())
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"the dashboard did not start: {line}")
        self.address = line.rsplit(": ", 1)[1].strip().rstrip("/")

    @property
    def cpu_s(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


async def measure(run: GrowingRun, server: Server, viewers: int, minutes: float, warm_s: float) -> dict[str, Any]:
    """Measure the first page, then the viewers."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        server.address, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as client:
        first = await first_page(client, server)
        growing = asyncio.create_task(grow(run))
        counts = [[0, 0] for _ in range(viewers)]
        tasks = [asyncio.create_task(view(client, one)) for one in counts]
        while not all(messages for messages, _ in counts):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(warm_s)
        cpu_s, began_s, before = server.cpu_s, time.monotonic(), [tuple(one) for one in counts]
        await asyncio.sleep(60 * minutes)
        cpu_s, elapsed = server.cpu_s - cpu_s, (time.monotonic() - began_s) / 60
        messages = sum(now[0] - then[0] for now, then in zip(counts, before, strict=True)) / viewers
        num_bytes = sum(now[1] - then[1] for now, then in zip(counts, before, strict=True)) / viewers
        for task in [*tasks, growing]:
            task.cancel()
        await asyncio.gather(*tasks, growing, return_exceptions=True)
    return {
        "cpu_s_per_minute": round(cpu_s / elapsed, 3), "share_of_core": round(cpu_s / elapsed / 60, 5),
        "messages_per_minute": round(messages / elapsed, 2), "kb_per_minute": round(num_bytes / elapsed / 1000, 1),
        "first_page": first,
    }  # fmt: skip


async def grow(run: GrowingRun) -> None:
    """Append a step every `step_s` and write the status every second."""
    due_s = time.monotonic()
    while True:
        run.report()
        if time.monotonic() >= due_s:
            due_s += run._step_s
            run.append(time.time())
        await asyncio.sleep(1.0)


async def view(client: aiohttp.ClientSession, counts: list[int]) -> None:
    """Read one page's stream; count messages and bytes, and reconnect as a browser does."""
    while True:
        async with client.get("/run/long/events") as answer:
            async for line in answer.content.iter_chunked(1 << 20):
                counts[0] += line.count(b"\nevent: ") + line.startswith(b"event: ")
                counts[1] += len(line)


async def first_page(client: aiohttp.ClientSession, server: Server) -> dict[str, float]:
    """Load everything that a browser needs to draw the curves."""
    cpu_s = server.cpu_s
    for path in ("/run/long", *(f"/static/{name}" for name in ASSETS)):
        async with client.get(path) as answer:
            answer.raise_for_status()
            await answer.read()
    num_bytes = 0
    async with client.get("/run/long/events") as answer:
        tail = b""
        while not tail.endswith(b"\n\n"):
            part = await answer.content.readany()
            num_bytes, tail = num_bytes + len(part), (tail + part)[-2:]
    return {"cpu_s": round(server.cpu_s - cpu_s, 3), "kb": round(num_bytes / 1000, 1)}


if __name__ == "__main__":
    main()
