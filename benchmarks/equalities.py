"""Does a run end with the same weights, bit for bit, in another mode or after its processes were killed?

    python -m benchmarks.equalities                        five seeds
    python -m benchmarks.equalities --seeds 1              one seed; the result goes next to the runs

For each seed four runs of a small job: `mode: sync`, `mode: async` with `max_staleness: 0`, and both again with the
trainer, the rollout worker and the controller killed by SIGKILL, each once after a random step; after the controller's
death `areal-like resume` continues the run. The four exported policies are compared tensor by tensor, and both killed
runs are trained again by `areal-like replay`. Exit status 1 if a policy differs or a replay does.

The job has one slot of the embedded engine and one compute thread in each process (docs/replay.md, Equal runs): other
numbers of rows or threads change the order of sums.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.killed_run import KilledRun
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, environment, write
from controller.runs.replay.tensors import digests_in, total

NUM_STEPS, CHECKPOINT_STEPS = 10, 3
JOB = (
    "warm_start.data.options.max_terms=4", "warm_start.sft.steps=60", "warm_start.sft.threads=1",
    "data.train.limit=500", "data.train.options.max_terms=4", "data.eval.limit=4", "data.eval.options.max_terms=4",
    "groups_per_step=4", "group_size=4", "sampling.max_new_tokens=48", "rollout.engine.num_slots=1",
    "rollout.threads=1", "trainer.threads=1", "rollout.max_restarts=10", "trainer.max_restarts=10",
    f"trainer.checkpoint.every_steps={CHECKPOINT_STEPS}", f"num_steps={NUM_STEPS}", "eval.every_steps=0",
    "eval.at_start=false", "metrics.report=false", "metrics.display=plain",
)  # fmt: skip
MODES: dict[str, tuple[str, ...]] = {
    "sync": ("mode=sync",),
    "bound 0": ("mode=async", "staleness.max_staleness=0"),
}
KILLED = ("trainer", "rollout", "controller")
SPREAD_S = 1.0
"""Seconds after a step within which a process is killed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.equalities", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1 on (5)")
    parser.add_argument("--at-once", type=int, default=1, help="seeds that are measured at the same time (1)")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parser.parse_args()
    if options.seeds < 1 or options.at_once < 1:
        parser.error("--seeds and --at-once must be at least 1")
    began_s = time.monotonic()
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda seed: measure(seed, options.runs_dir.resolve()), range(1, options.seeds + 1)):
            rows.append(row)
            print(words(row), flush=True)
    fields = {"num_steps": NUM_STEPS, "seeds": rows, "wall_s": round(time.monotonic() - began_s, 1)}
    print(f"written to {write('equalities', command_of('equalities'), fields, result_path('equalities', options))}")
    raise SystemExit(0 if all(is_equal(row) for row in rows) else 1)


def measure(seed: int, runs_dir: Path) -> dict[str, Any]:
    """The four runs of one seed: SHA-256 of the policy of each, what was killed, and whether the replays were equal."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    policies, kills, replays = {}, {}, {}
    for mode, settings in MODES.items():
        for is_killed in (False, True):
            name = f"{mode}, killed" if is_killed else mode
            with tempfile.TemporaryDirectory(prefix="equalities-") as scratch:
                overrides = [*JOB, *settings, f"seed={seed}", f"runs_dir={runs_dir}"]
                folder_name = f"equal-{seed}-{name.replace(', ', '-').replace(' ', '-')}-{os.getpid()}"
                run = KilledRun("quickstart", overrides, folder_name, runs_dir, Path(scratch))
                try:
                    if is_killed:
                        kills[name] = kill_all(run, random.Random(f"{seed} {mode}"))
                    run.wait_for_end()
                finally:
                    run.destroy()
                policies[name] = total(digests_in(run.folder / "final"))
                if is_killed:
                    replays[name] = replay(run.folder)
    return {"seed": seed, "policies": policies, "kills": kills, "replays": replays}


def kill_all(run: KilledRun, dice: random.Random) -> list[str]:
    """Kill each kind once, in a random order, each at a random time after one of three random steps; what was killed
    when."""
    done = []
    steps = sorted(dice.sample(range(1, NUM_STEPS - 1), len(KILLED)))
    for step, kind in zip(steps, dice.sample(KILLED, len(KILLED)), strict=True):
        run.wait_for_step(step)
        run.watch(dice.uniform(0.0, SPREAD_S))
        before = run.kills.total()
        run.kill(kind)
        if run.kills.total() > before:
            done.append(f"{kind} after step {step}")
    return done


def replay(folder: Path) -> bool:
    """Whether `areal-like replay` finds no difference."""
    command = [sys.executable, "-P", "-m", "controller", "replay", str(folder)]
    found = subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False)
    return found.returncode == 0


def is_equal(row: dict[str, Any]) -> bool:
    """Whether all policies of a seed are the same and both replays were equal."""
    return len(set(row["policies"].values())) == 1 and all(row["replays"].values())


def words(row: dict[str, Any]) -> str:
    """The result of one seed as text."""
    kills = "; ".join(f"{name}: {', '.join(done)}" for name, done in row["kills"].items())
    if is_equal(row):
        return f"seed {row['seed']}: equal, sha256 {next(iter(row['policies'].values()))}; {kills}"
    replays = [name for name, is_same in row["replays"].items() if not is_same]
    return f"seed {row['seed']}: DIFFERENT: {row['policies']}; replays that differ: {replays or 'none'}; {kills}"


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("this benchmark reads /proc: it needs Linux")
    main()
