"""Does asynchrony cost accuracy, and what does it gain? The quickstart in three modes, seeds paired.

    python -m benchmarks.modes                       5 seeds x 3 modes, about 35 minutes on two cores
    python -m benchmarks.modes --quick               2 seeds, 20 steps, about 5 minutes
    python -m benchmarks.modes --config configs/quickstart.yaml num_steps=40

Accuracy is greedy, on held-out prompts, of the last checkpoint. `sync` has all cores in both phases, strictly one after
the other; `async` has one core per process. Modes of a seed run one after the other, in turn, on the same warm start.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.measured import Measured, add_options
from benchmarks.runs import command_of, mean_interval, write

MODES = ("sync", "one_step_off", "async")
KEYS = ("accuracy_before", "accuracy_after", "samples_per_s", "tokens_per_s", "train_wall_s", "trainer_wait_share",
        "rollout_idle_share", "staleness_mean", "staleness_max", "steps", "audit")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parser.parse_intermixed_args()
    seeds = [1, 2] if options.quick else [int(seed) for seed in options.seeds.split(",")]
    extra = ["num_steps=20", "data.eval.limit=300"] if options.quick else []
    overrides = ["eval.every_steps=0", *extra, *options.overrides]
    measured = Measured.of("modes", options)
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for mode in MODES:
            given = [f"seed={seed}", f"mode={mode}", *overrides]
            summary = measured.job(options.config, given, options.runs_dir)
            rows.append({"seed": seed, "mode": mode, **{key: summary[key] for key in (*KEYS, "measured")}})
            print(
                "  ".join(f"{key} {rows[-1][key]}" for key in ("seed", "mode", *KEYS[:5], "staleness_max")), flush=True
            )
    result = compare(rows)
    print_table(result)
    if not options.quick:
        path = write("modes", command_of("modes"), {"rows": rows, **result})
        print(f"written to {path}")
    measured.finish()


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per mode: means; against sync: paired difference of accuracy and paired ratio of throughput, 95 % intervals."""
    by_mode = {mode: {row["seed"]: row for row in rows if row["mode"] == mode} for mode in MODES}
    result: dict[str, Any] = {"modes": {}, "against_sync": {}}
    for mode in MODES:
        runs = by_mode[mode].values()
        result["modes"][mode] = {
            key: mean_interval([run[key] for run in runs])
            for key in ("accuracy_after", "samples_per_s", "tokens_per_s")
        }
    for mode in MODES[1:]:
        pairs = [(by_mode[mode][seed], by_mode["sync"][seed]) for seed in by_mode["sync"]]
        result["against_sync"][mode] = {
            "accuracy_difference": mean_interval([a["accuracy_after"] - b["accuracy_after"] for a, b in pairs]),
            "throughput_ratio": mean_interval([a["samples_per_s"] / b["samples_per_s"] for a, b in pairs]),
        }
    return result


def print_table(result: dict[str, Any]) -> None:
    """The comparison, as text."""
    print(f"\n{'mode':14}{'accuracy':>18}{'samples/s':>18}{'tokens/s':>20}")
    for mode, values in result["modes"].items():
        accuracy, samples, tokens = (values[key] for key in ("accuracy_after", "samples_per_s", "tokens_per_s"))
        print(f"{mode:14}{accuracy[0]:10.3f} ±{accuracy[1]:6.3f}{samples[0]:10.1f} ±{samples[1]:6.1f}"
              f"{tokens[0]:11.0f} ±{tokens[1]:7.0f}")  # fmt: skip
    for mode, values in result["against_sync"].items():
        difference, ratio = values["accuracy_difference"], values["throughput_ratio"]
        print(f"{mode} against sync: accuracy {difference[0]:+.3f} ± {difference[1]:.3f}, "
              f"samples/s x {ratio[0]:.2f} ± {ratio[1]:.2f} (paired, 95 % interval)")  # fmt: skip


if __name__ == "__main__":
    main()
