"""Compares one job in several variants, with paired seeds: the results of each, and its difference from the first one.

Contains the command line, the runs in turn, and the comparison. The variants are in modes.py and engines.py.

Accuracy is greedy, on held-out prompts, of the last checkpoint. Variants of a seed run one after another, from the same
warm start. Intervals are 95 % intervals of the mean over seeds; differences and ratios are first taken within a seed.
Results for a user's own job are written next to its runs and do not replace the published result.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measured import INTEGERS, Measured, add_job, add_options, parse_job
from benchmarks.publishing import result_path
from benchmarks.runs import command_of, write
from benchmarks.spreads import half_words, mean_interval

MEANS = ("accuracy_after", "samples_per_s", "tokens_per_s")
KEYS = ("accuracy_before", *MEANS, "train_wall_s", "trainer_wait_share", "rollout_idle_share", "staleness_mean",
        "staleness_max", "steps", "audit")  # fmt: skip
SHOWN = (*KEYS[:5], "staleness_max")
"""Figures printed when a run ends."""
QUICK = ("num_steps=20", "data.eval.limit=300")
Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A comparison of several values of one setting. The others are compared with the first value."""

    name: str
    setting: str
    values: tuple[str, ...]
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Overrides by value with which it runs best in the published job. A user's CONFIG runs unchanged."""

    def main(self, description: str | None) -> None:
        """Parse the command line, run the jobs, print and write the result."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_job(parser)
        parser.add_argument("--seeds", type=INTEGERS, default="1,2,3,4,5")
        parser.add_argument("--quick", action="store_true")
        add_options(parser)
        options = parse_job(parser)
        config = options.config or "configs/quickstart.yaml"
        seeds = [1, 2] if options.quick else options.seeds
        overrides = ["eval.every_steps=0", *(QUICK if options.quick else ()), *options.overrides]
        measured = Measured.of(self.name, options)
        rows: list[Row] = []
        for seed in seeds:
            for value in self.values:
                best = () if options.config else self.own.get(value, ())
                given = [f"seed={seed}", f"{self.setting}={value}", *best, *overrides]
                summary = measured.job(config, given, options.runs_dir)
                rows.append({"seed": seed, "side": value, **{key: summary[key] for key in (*KEYS, "measured")}})
                print("  ".join(f"{key} {rows[-1][key]}" for key in ("seed", "side", *SHOWN)), flush=True)
        result = compare(rows, self.values)
        print_table(result)
        if not options.quick:
            path = result_path(self.name, options)
            print(f"written to {write(self.name, command_of(self.name), {'rows': rows, **result}, path)}")
        measured.finish()


def compare(rows: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> Row:
    """Means of each side; for all but the first also differences of accuracy and ratios of throughput, by seed."""
    by = {side: {row["seed"]: row for row in rows if row["side"] == side} for side in sides}
    base = by[sides[0]]
    against = {}
    for side in sides[1:]:
        pairs = [(by[side][seed], base[seed]) for seed in base]
        against[side] = {
            "accuracy_difference": mean_interval([a["accuracy_after"] - b["accuracy_after"] for a, b in pairs]),
            "throughput_ratio": mean_interval([a["samples_per_s"] / b["samples_per_s"] for a, b in pairs]),
        }
    means = {side: {key: mean_interval([row[key] for row in by[side].values()]) for key in MEANS} for side in sides}
    return {"base": sides[0], "sides": means, "against": against}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the comparison."""
    print(f"\n{'':14}{'accuracy':>18}{'samples/s':>18}{'tokens/s':>20}")
    for side, values in result["sides"].items():
        accuracy, samples, tokens = (values[key] for key in MEANS)
        print(f"{side:14}{accuracy[0]:10.3f} ±{half_words(accuracy[1], '.3f'):>6}"
              f"{samples[0]:10.1f} ±{half_words(samples[1], '.1f'):>6}"
              f"{tokens[0]:11.0f} ±{half_words(tokens[1], '.0f'):>7}")  # fmt: skip
    for side, values in result["against"].items():
        difference, ratio = values["accuracy_difference"], values["throughput_ratio"]
        print(f"{side} against {result['base']}: accuracy {difference[0]:+.3f} ± {half_words(difference[1], '.3f')}, "
              f"samples/s x {ratio[0]:.2f} ± {half_words(ratio[1], '.2f')} (paired, 95 % interval)")  # fmt: skip
