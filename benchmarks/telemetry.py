"""What does monitoring a run cost? The same job bare and monitored, side by side; then bare and with every sink.

    python -m benchmarks.telemetry                     8 rounds, some 25 minutes on two cores
    python -m benchmarks.telemetry --rounds 12 --steps 60
    python -m benchmarks.telemetry mine.yaml key=value your own job; its result is written next to its runs (--runs-dir)
    python -m benchmarks.telemetry --quick             one round of small jobs, to check that it runs

bare       no trace, and the controller's rows, pulses and status.json are switched off in its process (there is no key
           for that: they are always written)
watched    the default: trace of every process, metrics.jsonl with pulses, status.json
sinks      the same with TensorBoard, W&B offline and a Prometheus endpoint that is scraped every five seconds

The two jobs of a pair run at the same time, each pinned to half of the cores, so that other load of the machine affects
both. The halves are not equally fast (by up to 3 % here), so they are swapped from round to round, and a round is
evaluated together with the next one, which cancels the difference. Processor seconds and wall seconds are counted from
step FIRST_STEP to the last, over all processes of a run and their children. The result is the share of throughput lost,
1 - (bare's cost per sample / the other's): the mean over such double rounds with its 95 % interval.

`mode: sync` with one thread each, so that all runs draw the same samples and differ only in the monitoring. Per sample
and per second, the same is written in `async`, where all cores are busy and processor time limits throughput.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from areal_like.guard import tied
from areal_like.process import command_words
from benchmarks.measured import add_job, parse_job
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, environment, write
from benchmarks.spreads import half_words, mean_interval

FIRST_STEP = 2
"""Counting begins after this step, when processes have started and the pipeline is full."""
SCRAPE_S = 5.0
LIMIT = 0.02
DEADLINE_S = 1800.0
FORK_SERVER = "forkserver"
"""Its children are counted separately: they are the run's processes."""
WATCHED_ARMS = ("watched", "sinks")
SETTINGS = {
    "bare": ["metrics.trace=false"],
    "watched": [],
    "sinks": ["metrics.tensorboard=true", "metrics.wandb={}", "metrics.prometheus.port=0"],
}
JOB = [
    "data.eval=null", "eval.every_steps=0", "metrics.display=plain",
    "mode=sync", "rollout.threads=1", "trainer.threads=1",
]  # fmt: skip
Pair = dict[str, dict[str, float]]
"""Costs per sample by arm, of two jobs that ran at the same time."""
QUICK = ["groups_per_step=12", "group_size=4", "warm_start=null"]


def main() -> None:
    if sys.argv[1:2] == ["--bare"]:
        raise SystemExit(run_bare(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument("--rounds", type=int, default=8, help="an even number")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    options = parse_job(parser)
    if options.rounds % 2:
        parser.error("--rounds: give an even number: every round is repeated with the halves of the machine swapped")
    config = options.config or "configs/quickstart.yaml"
    overrides = [*JOB, *(QUICK if options.quick else []), *options.overrides]
    rounds, steps = (1, 4) if options.quick else (options.rounds, options.steps)
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    pairs: dict[str, list[Pair]] = {arm: [] for arm in WATCHED_ARMS}
    for number in range(rounds):
        for arm in WATCHED_ARMS:
            named = [*overrides, f"num_steps={steps}", f"runs_dir={options.runs_dir}"]
            pair = side_by_side(arm, config, named, steps, is_swapped=number % 2 == 1)
            pairs[arm].append(pair)
            for name, costs in pair.items():
                print(f"round {number + 1} {name:8} " + "  ".join(f"{k} {v:.4g}" for k, v in costs.items()), flush=True)
    result = {arm: judge(arm, found) for arm, found in pairs.items()}
    print_table(result)
    if options.quick:
        print("the run completed, but was too short for meaningful figures")
        return
    facts = {"rounds": rounds, "steps": steps, "overrides": options.overrides, "limit": LIMIT, **result}
    path = result_path("telemetry", options)
    path = write("telemetry", command_of("telemetry"), {**facts, "runs": pairs}, path)
    print(f"written to {path}")
    raise SystemExit(0 if result["watched"]["cpu_lost"]["mean"] < LIMIT else 1)


def run_bare(arguments: list[str]) -> int:
    """Run `areal-like` with the controller's own rows switched off."""
    from controller.cli import main
    from controller.runtime import monitor
    from controller.telemetry.journal import Journal
    from controller.telemetry.status import StatusFile

    Journal.append = lambda self, record: None  # type: ignore[method-assign]
    StatusFile.write = lambda self, status, **facts: None  # type: ignore[method-assign]
    StatusFile.is_due = lambda self: False  # type: ignore[method-assign]
    monitor.interval_s = lambda elapsed_s, num_processes: float("inf")
    return main.main(arguments)


def side_by_side(arm: str, config: str, overrides: list[str], steps: int, *, is_swapped: bool) -> Pair:
    """Run a bare and a monitored job at the same time, each on its half of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    halves = [cores[::2], cores[1::2] or cores]
    names = ("bare", arm)
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(run, name, config, [*overrides, f"name=telemetry-{name}"], steps, half)
            for name, half in zip(names, reversed(halves) if is_swapped else halves, strict=True)
        ]
        return {name: job.result() for name, job in zip(names, jobs, strict=True)}


def run(arm: str, config: str, overrides: list[str], steps: int, cores: list[int]) -> dict[str, float]:
    """Run one job; milliseconds per sample from step FIRST_STEP to the last. Raises SystemExit if it fails."""
    module = ["benchmarks.telemetry", "--bare"] if arm == "bare" else ["controller"]
    process = subprocess.Popen(
        tied([sys.executable, "-P", "-m", *module, "train", config, *overrides, *SETTINGS[arm]]),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        env={**environment(), "PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    psutil.Process(process.pid).cpu_affinity(cores)  # inherited by its children
    begun: tuple[float, dict[str, float]] | None = None
    ended: tuple[float, dict[str, float]] | None = None
    lines: list[str] = []
    scraper: subprocess.Popen[bytes] | None = None
    try:
        for line in process.stdout:
            lines.append(line)
            if "metrics for Prometheus at " in line:
                scraper = scrape(line.split(" at ", 1)[1].split()[0])
            if line.startswith(f"step {FIRST_STEP}/"):
                begun = (time.monotonic(), cpu_s(process.pid))
            elif line.startswith(f"step {steps}/"):
                ended = (time.monotonic(), cpu_s(process.pid))
        if process.wait(DEADLINE_S) != 0 or begun is None or ended is None:
            raise SystemExit(f"{arm} ended with {process.returncode}:\n{''.join(lines[-60:])}")
    finally:
        for one in (scraper, process):
            if one is not None and one.poll() is None:
                one.kill()
                one.wait(10)
    per_step = next(int(value) for line in lines if (value := samples_consumed(line))) / steps
    samples = per_step * (steps - FIRST_STEP)
    costs = {"wall_ms": (ended[0] - begun[0]) / samples * 1e3}
    for name, spent_s in sorted(ended[1].items()):
        key = "cpu_ms" if name == "all" else f"cpu_ms.{name}"
        costs[key] = (spent_s - begun[1].get(name, 0.0)) / samples * 1e3
    return costs


def samples_consumed(line: str) -> str:
    """The number of consumed samples in a line of the summary; empty for another line."""
    key, _, value = line.partition(" ")
    return value.strip() if key == "samples_consumed" else ""


def scrape(url: str) -> subprocess.Popen[bytes]:
    """Start a process that reads the endpoint as Prometheus does."""
    code = f"from benchmarks.telemetry import keep_scraping; keep_scraping({url!r})"
    return subprocess.Popen(tied([sys.executable, "-c", code]), env=environment())


def keep_scraping(url: str) -> None:
    """Read the endpoint until it no longer exists."""
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            with urllib.request.urlopen(url, timeout=10.0) as answer:
                answer.read()
        except (urllib.error.URLError, OSError):
            return
        time.sleep(SCRAPE_S)


def cpu_s(pid: int) -> dict[str, float]:
    """Processor seconds of a run for each child of its controller with its descendants, ended ones included; and
    `all`."""
    found: dict[str, float] = {}
    controller = psutil.Process(pid)
    families = [("controller", [controller])]
    children = controller.children()
    for child in children:
        try:
            if (name := name_of(child)) == FORK_SERVER:
                children += child.children()
                families.append((name, [child]))
                continue
            families.append((name, [child, *child.children(recursive=True)]))
        except psutil.NoSuchProcess:
            continue
    for name, family in families:
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            below = times.children_user + times.children_system if process is not controller else 0.0
            found[name] = found.get(name, 0.0) + times.user + times.system + below
    return {**found, "all": sum(found.values())}


def name_of(process: psutil.Process) -> str:
    """The name in the process's spec (`trainer`, `rollout-0`, `reward`), otherwise the module it runs."""
    line = command_words(process)
    if "--spec" in line:
        return Path(line[line.index("--spec") + 1]).stem
    return line[line.index("-m") + 1].rpartition(".")[2] if "-m" in line else process.name()


def judge(arm: str, pairs: list[Pair]) -> dict[str, Any]:
    """Share of throughput lost against bare: mean, half width of the 95 % interval, and each double round."""
    result: dict[str, Any] = {}
    for cost, key in (("cpu_ms", "cpu_lost"), ("wall_ms", "wall_lost")):
        single = [1 - pair["bare"][cost] / pair[arm][cost] for pair in pairs]
        lost = [statistics.mean(single[i : i + 2]) for i in range(0, len(single), 2)]
        mean, half = mean_interval(lost)
        result[key] = {
            "mean": round(mean, 5), "half_width_95": None if half is None else round(half, 5),
            "median": round(statistics.median(lost), 5), "double_rounds": [round(value, 5) for value in lost],
        }  # fmt: skip
    return result


def print_table(result: dict[str, Any]) -> None:
    """Print the result."""
    print(f"{'':10}{'by processor time':>26}{'by wall time':>26}")
    for arm, costs in result.items():
        cells = [f"{cost['mean']:+.2%} +- {half_words(cost['half_width_95'], '.2%')}" for cost in costs.values()]
        print(f"{arm:10}" + "".join(f"{cell:>26}" for cell in cells))
    print("share of throughput lost against a bare run")


if __name__ == "__main__":
    main()
