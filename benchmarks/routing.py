"""What do routing by expected tokens, affinity and migration gain over round robin?

    python -m benchmarks.routing                     emulated: 10 seeds; real: 3 rounds, about 15 minutes on two cores
    python -m benchmarks.routing --quick             3 seeds, one short round, about 3 minutes
    python -m benchmarks.routing --no-real           the emulated part alone, under a minute
    python -m benchmarks.routing mine.yaml num_steps=20    your own config in the real part, and overrides of it

With CONFIG or overrides the result is written next to the runs (--runs-dir), not over the published one.

*Emulated*: workers that take a given time instead of computing (benchmarks/paced.py), around the real coordinator and
under a virtual clock; long-tailed lengths, and synchronous steps, which wait for the last answer. Two synthetic kinds
of device: one whose decode step takes time in proportion to its batch (a CPU), and one whose step hardly depends on it
(a GPU). Seeds are paired: every policy gets the same answers.
*Real*: the quickstart in `mode: sync` with two rollout workers on this machine's cores, policies in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measured import add_job, parse_job
from benchmarks.paced import Lengths, Pace, PacedRun
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, train, write
from benchmarks.spreads import half_words, mean_interval
from controller.coordinator.settings import CoordinatorSettings

POLICIES: dict[str, dict[str, Any]] = {
    "round_robin": {"routing": "round_robin", "migration": False},
    "least_tokens, no affinity": {"affinity": 0.0, "migration": False},
    "least_tokens": {"migration": False},
    "least_tokens, migration": {"migration": True, "min_gain_s": 0.5},
}
"""Settings by policy; `least_tokens` has affinity 1, the default."""
BASE = "round_robin"
DEVICES = {
    "step in proportion to its batch": Pace(0.0, 1e-3, 1e-4),
    "step hardly dependent on its batch": Pace(10e-3, 0.05e-3, 0.02e-3),
}
POOLS = {"2 equal": [1.0, 1.0], "4 equal": [1.0] * 4, "4 mixed": [1.0, 1.0, 2.5, 2.5]}
"""Slowness of each worker."""
REAL: dict[str, list[str]] = {
    "round_robin": ["rollout.routing.policy=round_robin", "rollout.routing.migration=false"],
    "least_tokens": ["rollout.routing.migration=false"],
    "least_tokens, migration": ["rollout.routing.min_gain_s=0.2"],
}
REAL_KEYS = ("samples_per_s", "tokens_per_s", "rollout_idle_share", "steps", "audit")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-real", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parse_job(parser)
    seeds = range(1, 4) if options.quick else range(1, 11)
    rows = emulate(list(seeds), num_steps=4 if options.quick else 8)
    result: dict[str, Any] = {
        "devices": {name: dataclasses.asdict(pace) for name, pace in DEVICES.items()},
        "emulated_rows": rows,
        "emulated": compare(rows),
    }
    print_emulated(result["emulated"])
    if not options.no_real:
        steps = ["num_steps=8" if options.quick else "num_steps=40", "data.eval=null", "eval.every_steps=0"]
        config = options.config or "configs/quickstart.yaml"
        real_rows = measure(config, 1 if options.quick else 3, [*steps, *options.overrides], options.runs_dir)
        result |= {"real_rows": real_rows, "real": compare_real(real_rows)}
        print_real(result["real"])
    if not options.quick:
        path = write("routing", command_of("routing"), result, result_path("routing", options))
        print(f"written to {path}")


def emulate(seeds: Sequence[int], num_steps: int) -> list[Row]:
    """Run every device, pool and policy on every seed."""
    rows = []
    for device, pace in DEVICES.items():
        for pool, slowness in POOLS.items():
            for seed in seeds:
                for policy, changes in POLICIES.items():
                    paces = [dataclasses.replace(pace, slowness=value) for value in slowness]
                    rows.append({"device": device, "pool": pool, "seed": seed, "policy": policy,
                                 **emulate_one(paces, changes, seed, num_steps)})  # fmt: skip
    return rows


def emulate_one(paces: list[Pace], changes: dict[str, Any], seed: int, num_steps: int) -> Row:
    """Simulate one run; the first step, in which lengths and speeds are still unknown, is left out."""
    lengths = Lengths()
    settings = CoordinatorSettings(
        groups_per_step=8 * len(paces), group_size=8, num_steps=num_steps + 1, mode="sync", max_staleness=0,
        num_workers=len(paces), max_new_tokens=lengths.most, group_timeout_s=1e9, **changes,
    )  # fmt: skip
    outcome = PacedRun(settings, paces, lengths, slots=64, seed=seed).run()
    return {
        "step_s": fmean(outcome.step_s[1:]), "tail_s": fmean(outcome.tail_s[1:]),
        "prefill_tokens": outcome.prefill_tokens, "num_migrated": outcome.num_migrated,
    }  # fmt: skip


def compare(rows: Sequence[Row]) -> list[Row]:
    """For each device, pool and policy: means, and the ratio of step times to round robin's, paired by seed."""
    result = []
    for device in DEVICES:
        for pool in POOLS:
            of = {policy: {row["seed"]: row for row in rows
                           if (row["device"], row["pool"], row["policy"]) == (device, pool, policy)}
                  for policy in POLICIES}  # fmt: skip
            for policy, by_seed in of.items():
                ratios = [of[BASE][seed]["step_s"] / row["step_s"] for seed, row in by_seed.items()]
                entry: Row = {"device": device, "pool": pool, "policy": policy, "speedup": mean_interval(ratios)}
                for key in ("step_s", "tail_s", "prefill_tokens", "num_migrated"):
                    entry[key] = fmean(row[key] for row in by_seed.values())
                result.append(entry)
    return result


def print_emulated(entries: Sequence[Row]) -> None:
    """Print the comparison."""
    print("emulated devices, synchronous steps, lognormal lengths (median 200, mean about 320, at most 2000 tokens)")
    for entry in entries:
        if entry["policy"] == BASE:
            print(f"\n{entry['pool']} workers, {entry['device']}")
            print(f"  {'':28}{'step s':>9}{'tail s':>9}{'prefilled':>11}{'moved':>8}   against round_robin")
        mean, half = entry["speedup"]
        print(f"  {entry['policy']:28}{entry['step_s']:9.2f}{entry['tail_s']:9.2f}{entry['prefill_tokens']:11.0f}"
              f"{entry['num_migrated']:8.1f}   x {mean:.3f} ± {half_words(half, '.3f')}")  # fmt: skip


def measure(config: str, num_rounds: int, overrides: Sequence[str], runs_dir: Path) -> list[Row]:
    """Run real jobs, policies in turn within a round, each round with a different seed."""
    shared = ["mode=sync", "rollout.num_workers=2", "rollout.threads=1", "metrics.report=false"]
    rows = []
    for seed in range(1, num_rounds + 1):
        for policy, settings in REAL.items():
            summary = train(config, [f"seed={seed}", *shared, *settings, *overrides], runs_dir)
            row = {"seed": seed, "policy": policy, **{key: summary[key] for key in REAL_KEYS},
                   "num_migrated": count_moves(Path(summary["folder"]))}  # fmt: skip
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def count_moves(folder: Path) -> int:
    """Number of migrations of a run."""
    records = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return sum(record.get("note") == "migrated" for record in records)


def compare_real(rows: Sequence[Row]) -> list[Row]:
    """For each policy: means, and throughput over round robin's, paired by seed."""
    base = {row["seed"]: row["samples_per_s"] for row in rows if row["policy"] == BASE}
    result = []
    for policy in REAL:
        mine = [row for row in rows if row["policy"] == policy]
        result.append({
            "policy": policy, "speedup": mean_interval([row["samples_per_s"] / base[row["seed"]] for row in mine]),
            **{key: fmean(row[key] for row in mine) for key in ("samples_per_s", "rollout_idle_share", "num_migrated")},
        })  # fmt: skip
    return result


def print_real(entries: Sequence[Row]) -> None:
    """Print the comparison."""
    print(f"\nreal: two workers on this machine\n  {'':28}{'samples/s':>11}{'idle':>8}{'moved':>8}")
    for entry in entries:
        mean, half = entry["speedup"]
        print(f"  {entry['policy']:28}{entry['samples_per_s']:11.1f}{entry['rollout_idle_share']:8.2f}"
              f"{entry['num_migrated']:8.1f}   x {mean:.3f} ± {half_words(half, '.3f')}")  # fmt: skip


if __name__ == "__main__":
    main()
