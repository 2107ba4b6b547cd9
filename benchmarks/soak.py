"""Does memory grow? A long quickstart, the resident memory of every process each second, the slope after minute three.

    python -m benchmarks.soak                        8 minutes of training, plus warm start and stop
    python -m benchmarks.soak --quick                four minutes: checks that it runs and ends; writes nothing
    python -m benchmarks.soak --minutes 30 rollout.num_workers=2

Minute 0 is the time at which both rollout worker and trainer run. Slopes are least squares over all samples after
minute three, without the first minute of a process (scoring processes are replaced as they age; the row `all together`
includes them). The target is below 1 MB/min for every process. Resident memory includes shared pages (weights in shared
memory), so a version that is never released is visible. The run is stopped by one SIGINT, as a user stops it, and must
end successfully.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from areal_like.guard import tied
from areal_like.process import command_words
from benchmarks.folders import REPOSITORY
from benchmarks.measured import add_job, parse_job
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, write

SETTLE_MIN, YOUNG_MIN = 3.0, 1.0
"""Minutes of the run, and of a later process, before its slope begins: caches fill and modules are imported."""
LIMIT_MB_PER_MIN = 1.0
START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 180.0
MANY_STEPS = 1_000_000
TOGETHER = "all together"
MB = 1 << 20

Samples = dict[str, list[tuple[float, float]]]
"""(minute, resident MB) for each process, named by its program."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parse_job(parser)
    config = options.config or "configs/quickstart.yaml"
    if options.quick:
        options.minutes = SETTLE_MIN + 1
    if options.minutes < SETTLE_MIN + 1:
        parser.error(f"the slope begins at minute {SETTLE_MIN:.0f}; give at least {SETTLE_MIN + 1:.0f} minutes")
    overrides = [f"num_steps={MANY_STEPS}", "name=soak", *options.overrides, f"runs_dir={options.runs_dir}"]
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    output = options.runs_dir / "soak.log"
    samples = watch(["train", config, *overrides], output, options.minutes)
    rows = [judge(name, points) for name, points in sorted(samples.items()) if points[-1][0] > SETTLE_MIN]
    print_table(rows)
    slopes = [row["slope_mb_per_min"] for row in rows if row["slope_mb_per_min"] is not None]
    is_good = max(slopes) < LIMIT_MB_PER_MIN
    if options.quick:
        print("the run completed, but was too short for meaningful figures")
        return
    result = {"minutes": options.minutes, "overrides": options.overrides, "is_below_limit": is_good, "processes": rows}
    path = write("soak", command_of("soak"), result, result_path("soak", options))
    print(f"written to {path}")
    raise SystemExit(0 if is_good else 1)


def watch(command: list[str], output: Path, minutes: float) -> Samples:
    """Run the command, sample its processes for `minutes`, and stop it. Raises SystemExit with its output on error."""
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY))
    with output.open("wb") as log:
        process = subprocess.Popen(
            tied([sys.executable, "-P", "-m", "controller", *command]),
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        family = Family(process.pid)
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not family.is_complete():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the run did not start:\n{output.read_text()[-4000:]}")
            time.sleep(0.5)
        start_s = time.monotonic()
        samples: Samples = {}
        while (minute := (time.monotonic() - start_s) / 60) < minutes:
            if process.poll() is not None:
                raise SystemExit(f"the run ended in minute {minute:.1f}:\n{output.read_text()[-4000:]}")
            found = family.resident_mb()
            for name, resident_mb in {**found, TOGETHER: sum(found.values())}.items():
                samples.setdefault(name, []).append((minute, resident_mb))
            time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        if process.wait(STOP_DEADLINE_S) != 0:
            raise SystemExit(f"the run did not end successfully:\n{output.read_text()[-4000:]}")
        return samples
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


class Family:
    """The processes of a run by name, such as `controller`, `rollout-0`, `reward` and `reward/1` (its first child)."""

    def __init__(self, controller_pid: int) -> None:
        self._controller = psutil.Process(controller_pid)
        self._names: dict[psutil.Process, str] = {self._controller: "controller"}
        self._num_children: dict[str, int] = {}

    def is_complete(self) -> bool:
        """Whether trainer and rollout worker run (the warm start is over)."""
        names = self.resident_mb().keys()
        return "trainer" in names and any(name.startswith("rollout") for name in names)

    def resident_mb(self) -> dict[str, float]:
        """Resident MB of each running process."""
        found: dict[str, float] = {}
        try:
            family = [self._controller, *self._controller.children(recursive=True)]
        except psutil.NoSuchProcess:
            return found
        for process in family:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[self._name(process)] = process.memory_info().rss / MB
            except psutil.NoSuchProcess:
                continue
        return found

    def _name(self, process: psutil.Process) -> str:
        name = self._names.get(process)
        if name is None:
            line = command_words(process)
            if "--spec" in line:  # missing between fork and exec: it is named the next time
                name = Path(line[line.index("--spec") + 1]).stem
            else:
                parent = process.parent()
                above = self._names.get(parent, "?") if parent else "?"
                if above in ("controller", "?"):
                    return f"starting {process.pid}"
                self._num_children[above] = self._num_children.get(above, 0) + 1
                name = f"{above}/{self._num_children[above]}"
            self._names[process] = name
        return name


def judge(name: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    """Resident MB at minutes 1, 3 and the end, and the slope; None if the process did not exist (long enough)."""
    minutes, resident = np.array(points).T
    late = minutes >= max(SETTLE_MIN, minutes[0] + YOUNG_MIN if minutes[0] > YOUNG_MIN else 0.0)
    is_long = late.any() and minutes[-1] - minutes[late][0] >= YOUNG_MIN
    slope = round(float(np.polyfit(minutes[late], resident[late], 1)[0]), 3) if is_long else None

    def at(minute: float) -> float | None:
        return round(float(resident[np.abs(minutes - minute).argmin()]), 1) if minutes[0] <= minute else None

    return {
        "process": name,
        "minute_1_mb": at(1.0),
        "minute_3_mb": at(SETTLE_MIN),
        "end_mb": at(float(minutes[-1])),
        "peak_mb": round(float(resident.max()), 1),
        "slope_mb_per_min": slope,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the result."""
    print(f"{'process':14}{'minute 1':>12}{'minute 3':>12}{'end':>12}{'peak':>12}{'slope MB/min':>16}")
    for row in rows:
        name, *numbers = ("-" if value is None else value for value in row.values())
        print(f"{name:14}" + "".join(f"{number:>12}" for number in numbers[:-1]) + f"{numbers[-1]:>16}")


if __name__ == "__main__":
    main()
