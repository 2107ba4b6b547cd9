"""Does the quickstart's job survive minutes of faults without losing anything, and how long does it take to recover?

    python -m benchmarks.chaos --minutes 30              the published form
    python -m benchmarks.chaos                           5 minutes; the result is written next to the runs
    python -m benchmarks.chaos warm_start.sft.steps=20   with other settings; never published by default

`areal-like train --keep-alive` runs the job. After its first steps faults follow one another, each as soon as the run
has recovered from the last one: SIGKILL and SIGSTOP (SIGCONT after 3 to 15 s) of controller, rollout worker, trainer
and reward service, and a full disk. Recovered: the killed process is replaced, and a step has finished since; so the
time of one step is part of every figure. Then the run is stopped, and `areal-like verify` must find nothing; no
process, shared memory or temporary file may be left. The same job is trained without faults for as many steps, and both
policies are evaluated on the same held-out prompts.

The disk is a tmpfs of 1 GB, which takes root; otherwise it is not filled, and the result says why. Not caused are
faults of the network (all processes talk over the loopback interface, which other programs share) and jumps of the
clock (they would concern the whole machine).

Exit status 1 if anything is found, lost or left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos_run import ChaosRun, FaultKind, command, drawn_faults, fault_kinds, small_disk
from benchmarks.publishing import RUNS, add_replace, next_to_runs, result_path
from benchmarks.runs import command_of, train, write

Row = dict[str, Any]
SEED = 1
PUBLISHED_MINUTES = 30.0
PAUSE_S = 3.0
"""Longest pause between recovery and the next fault."""
CONFIG = "quickstart"
OVERRIDES = (
    "groups_per_step=12", "eval.every_steps=0", "eval.at_start=false", "metrics.report=false",
    "metrics.display=plain", "trainer.checkpoint.every_steps=5", "trainer.optimizer.schedule=constant",
    "rollout.num_workers=2", "rollout.threads=1", "rollout.max_restarts=1000", "reward.max_restarts=1000",
    "trainer.max_restarts=1000",
)  # fmt: skip
ENDLESS = "num_steps=100000"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="time with faults")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="other settings of the job")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # end the run and unmount its disk
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    path = (
        result_path("chaos", options)
        if options.minutes >= PUBLISHED_MINUTES or options.replace
        else next_to_runs("chaos", options)
    )
    found = measure(options.minutes * 60, options.overrides, options.runs_dir.resolve())
    print(words(found))
    print(f"written to {write('chaos', command_of('chaos'), found, path)}")
    raise SystemExit(0 if is_good(found) else 1)


def measure(seconds: float, overrides: Sequence[str], runs_dir: Path) -> Row:
    """Run the job with faults, then without, and compare."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        disk = scratch / "disk"
        disk.mkdir()
        no_disk = stack.enter_context(small_disk(disk))
        if no_disk:
            print(f"the disk is not filled: {no_disk}", flush=True)
        found = with_faults(seconds, overrides, disk, scratch, fault_kinds(has_small_disk=not no_disk))
        model = scratch / "policy"
        _must(command("export", found["folder"], str(model)))
        found |= {"disk_not_filled": no_disk, "accuracy": accuracy_of(Path(found["folder"]), model, runs_dir)}
        shutil.rmtree(runs_dir / "chaos", ignore_errors=True)
        shutil.copytree(found["folder"], runs_dir / "chaos", ignore=shutil.ignore_patterns("keys"))
    without = train(CONFIG, [*OVERRIDES, *overrides, f"num_steps={found['steps']}"], runs_dir)
    found["accuracy_without"] = accuracy_of(Path(without["folder"]), Path(without["folder"]) / "final", runs_dir)
    return {**found, "folder": str(runs_dir / "chaos"), "minutes": seconds / 60}


def with_faults(
    seconds: float, overrides: Sequence[str], runs_dir: Path, scratch: Path, kinds: Sequence[FaultKind]
) -> Row:
    """The run with faults, from its start to its verification."""
    name, dice, faults = f"chaos-{os.getpid()}", random.Random(SEED), list[Row]()
    settings = [*OVERRIDES, *overrides, ENDLESS, f"runs_dir={runs_dir}"]
    run = ChaosRun(CONFIG, settings, name, runs_dir, scratch)
    try:
        run.wait_for_step(2)
        before_s, first = time.monotonic(), run.num_steps()
        run.wait_for_step(first + 3)
        step_s = (time.monotonic() - before_s) / (run.num_steps() - first)
        ends_s = time.monotonic() + seconds
        for kind in drawn_faults(kinds, dice):
            run.watch(dice.uniform(0.0, PAUSE_S))
            if time.monotonic() > ends_s:
                break
            if (row := run.strike(kind)) is not None:
                faults.append(row)
                print(f"{row['fault']}: recovered after {row['recovery_s']:.1f} s", flush=True)
        run.end()
    finally:
        run.destroy()
    left, verified = run.left(), command("verify", str(run.folder))
    counts = run.recount()
    return {
        "folder": str(run.folder), "step_s": round(step_s, 2), "faults": faults, "left": left,
        "verify": "clean" if verified.returncode == 0 else (verified.stdout + verified.stderr).strip()[-2000:],
        "steps": run.num_steps(), **counts,
    }  # fmt: skip


def accuracy_of(run: Path, model: Path, runs_dir: Path) -> Row:
    """Accuracy of an exported policy of a run on its held-out prompts."""
    _must(command("eval", str(run), f"model.path={model}", f"name={run.name}", f"runs_dir={runs_dir}"))
    folder = max(runs_dir.glob(f"{run.name}-eval*"), key=lambda path: path.stat().st_mtime)
    (accuracy,) = json.loads((folder / "summary.json").read_text())["accuracy_by_version"].values()
    return {"accuracy": accuracy, "folder": str(folder)}


def _must(done: Any) -> None:
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(done.args[3:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-4000:])


def is_good(found: Row) -> bool:
    """Whether nothing was found, lost or left."""
    return not (found["verify"] != "clean" or found["findings"] or found["dropped"] or any(found["left"].values()))


def words(found: Row) -> str:
    """The result as text."""
    left = ", ".join(f"{what} {names}" for what, names in found["left"].items() if names) or "nothing"
    return (
        f"{len(found['faults'])} faults in {found['minutes']:g} minutes, {found['steps']} steps; verify: "
        f"{found['verify']}; findings: {found['findings'] or 'none'}; groups dropped: {found['dropped']}; "
        f"left: {left}; accuracy {found['accuracy']['accuracy']:.3f}, without faults "
        f"{found['accuracy_without']['accuracy']:.3f}"
    )


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("this benchmark reads /proc: it needs Linux")
    main()
