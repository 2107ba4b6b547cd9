"""Does a complete run lose or repeat a sample if its processes are killed in the middle of thousands of episodes?

    python -m benchmarks.killed_runs                                    2,000 environments, then 500 programs of agents
    python -m benchmarks.killed_runs --quick                            64 of each; writes nothing
    python -m benchmarks.killed_runs --environments 0 --agents 100      one of the two

Two runs of `areal-like train` with real workers, trainer, reward service and ledger: `guess_number` with --environments
concurrent environments, and `agent_tool_sum` with --agents concurrent programs, each a separate process. After every
step processes get SIGKILL at random times: environment processes or programs, and in turn the reward service, a rollout
worker, the trainer, and the controller, after which `areal-like resume` continues the run.

At the end the groups and samples of each run are counted from its ledger, by the audit and by a second count
(`recount`): every group that was drawn is consumed, filtered, dropped or in flight, and every sample is trained on in
at most one step. `failed`: samples without a reward; the program of each must have been killed. `left`: processes,
shared memory and temporary files that remain. Exit status 1 if anything is lost, repeated or left.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent_memory import memory_of_programs
from benchmarks.killed_run import HARD, KilledRun
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, write

SEED = 1
SPREAD_S = 4.0
"""Seconds over which the kills after a step are spread."""


@dataclass(frozen=True)
class Part:
    """One of the two runs.

    soft: kind of processes whose loss costs at most their own samples. num_soft: how many are killed after each step.
    """

    name: str
    config: str
    soft: str
    num_soft: int
    num_steps: int
    overrides: tuple[str, ...]


COMMON = (
    "eval.every_steps=0", "metrics.report=false", "metrics.display=plain", "staleness.max_staleness=4",
    "rollout.num_workers=2", "rollout.threads=1", "rollout.max_restarts=1000", "reward.max_restarts=1000",
    "trainer.max_restarts=1000",
)  # fmt: skip


def environments_part(num: int) -> Part:
    """The run with `num` concurrent environments."""
    slots = min(64, num // 4)
    overrides = (
        *COMMON, f"rollout.engine.num_slots={slots}", f"rollout.queue_samples={num // 2 - slots}", "group_size=8",
        f"groups_per_step={max(num // 32, 2)}", "reward.environment.num_processes=4", "data.eval.limit=1",
    )  # fmt: skip
    return Part("environments", "guess_number", "environment", 2, 9, overrides)


def agents_part(num: int) -> Part:
    """The run with `num` concurrent programs."""
    slots = min(32, num // 4)
    overrides = (
        *COMMON, f"rollout.engine.num_slots={slots}", f"rollout.queue_samples={num // 2 - slots}", "group_size=8",
        f"groups_per_step={max(num // 32, 2)}", "data.eval.limit=1",
    )  # fmt: skip
    return Part("agents", "agent_tool_sum", "program", 5, 9, overrides)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.killed_runs", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--environments", type=int, default=2000, help="at once; 0: leave them out")
    parser.add_argument("--agents", type=int, default=500, help="programs at once; 0: leave them out")
    parser.add_argument("--quick", action="store_true", help="64 of each, and no result file")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parser.parse_args()
    if options.quick:
        options.environments, options.agents = min(options.environments, 64), min(options.agents, 64)
    for name in ("environments", "agents"):
        if 0 < getattr(options, name) < 64:
            parser.error(f"--{name} must be 0 or at least 64")
    parts = [environments_part(options.environments)] if options.environments else []
    parts += [agents_part(options.agents)] if options.agents else []
    found: dict[str, Any] = {part.name: measure(part, options.runs_dir.resolve()) for part in parts}
    if options.agents and not options.quick:
        found["program_memory"] = memory_of_programs()
    for part in parts:
        print(words(part.name, found[part.name]))
    if not options.quick:
        fields = {"num_environments": options.environments, "num_agents": options.agents, **found}
        path = write("killed_runs", command_of("killed_runs"), fields, result_path("killed_runs", options))
        print(f"written to {path}")
    raise SystemExit(0 if all(is_good(found[part.name]) for part in parts) else 1)


def measure(part: Part, runs_dir: Path) -> dict[str, Any]:
    """Execute one run, from its start to the recount."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="killed-runs-") as scratch:
        overrides = [*part.overrides, f"num_steps={part.num_steps}", f"runs_dir={runs_dir}"]
        run = KilledRun(part.config, overrides, f"killed-{part.name}-{os.getpid()}", runs_dir, Path(scratch))
        began_s = time.monotonic()
        try:
            for kind in orders(part, run):
                run.kill(kind)
            run.wait_for_end()
        finally:
            run.destroy()
        found = {
            **run.recount(), "most_at_once": run.most_at_once, "kills": dict(sorted(run.kills.items())),
            "resumes": run.num_resumes, "left": run.left(), "wall_s": round(time.monotonic() - began_s, 1),
        }  # fmt: skip
        if part.soft == "program":
            found["max_failed"] = run.kills[part.soft]
        return found


def orders(part: Part, run: KilledRun) -> Iterator[str]:
    """The kinds of processes to kill, each yielded at its time."""
    dice = random.Random(SEED)
    for step in range(1, part.num_steps):
        run.wait_for_step(step)
        kinds = [part.soft] * part.num_soft + [HARD[step % len(HARD)]]
        dice.shuffle(kinds)
        instants_s = sorted(dice.uniform(0.0, SPREAD_S) for _ in kinds)
        for instant_s, before_s, kind in zip(instants_s, [0.0, *instants_s], kinds, strict=False):
            run.watch(instant_s - before_s)
            yield kind


def is_good(found: dict[str, Any]) -> bool:
    """Whether nothing was lost, repeated or left."""
    failed_too_many = found["failed"] > found.get("max_failed", 0)
    return not (found["findings"] or found["dropped"] or failed_too_many or any(found["left"].values()))


def words(name: str, found: dict[str, Any]) -> str:
    """The result of one run as text."""
    kills = ", ".join(f"{count} {kind}" for kind, count in found["kills"].items())
    left = ", ".join(f"{what} {names}" for what, names in found["left"].items() if names) or "nothing"
    return (
        f"{name}: {found['most_at_once']} at once; killed {kills}; {found['consumed']} groups consumed, "
        f"{found['trained']} samples trained on once, {found['dropped']} groups dropped, {found['failed']} samples "
        f"failed; left: {left}; findings: {found['findings'] or 'none'}"
    )


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("this benchmark reads /proc: it needs Linux")
    main()
