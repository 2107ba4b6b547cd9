"""Does it matter which engine generates? The quickstart with the embedded engine and with SGLang, seeds paired.

    python -m benchmarks.engines                       5 seeds x 2 engines
    python -m benchmarks.engines --quick               2 seeds, 20 steps
    python -m benchmarks.engines rollout.interruption=keep_kv

Needs an environment with SGLang (`make sglang-cpu`). Accuracy is greedy, on held-out prompts, of the last checkpoint.
The engines sample from the same distributions with other random numbers, so single runs differ and their mean
difference should not. Samples per second of the run include the server's start.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.measured import Measured, add_options
from benchmarks.runs import command_of, mean_interval, write

ENGINES = ("embedded", "sglang")
KEYS = ("accuracy_before", "accuracy_after", "samples_per_s", "tokens_per_s", "train_wall_s", "trainer_wait_share",
        "staleness_mean", "staleness_max", "steps", "audit")  # fmt: skip


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
    measured = Measured.of("engines", options)
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for engine in ENGINES:
            given = [f"seed={seed}", f"rollout.engine.kind={engine}", *overrides]
            summary = measured.job(options.config, given, options.runs_dir)
            rows.append({"seed": seed, "engine": engine, **{key: summary[key] for key in (*KEYS, "measured")}})
            print("  ".join(f"{key} {rows[-1][key]}" for key in ("seed", "engine", *KEYS[:5])), flush=True)
    result = compare(rows)
    print_table(result)
    if not options.quick:
        path = write("engines", command_of("engines"), {"rows": rows, **result})
        print(f"written to {path}")
    measured.finish()


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per engine: means; SGLang against embedded: paired differences and ratios, 95 % intervals."""
    by_engine = {engine: {row["seed"]: row for row in rows if row["engine"] == engine} for engine in ENGINES}
    pairs = [(by_engine["sglang"][seed], by_engine["embedded"][seed]) for seed in by_engine["embedded"]]
    return {
        "engines": {
            engine: {
                key: mean_interval([run[key] for run in by_engine[engine].values()])
                for key in ("accuracy_after", "samples_per_s", "tokens_per_s")
            }
            for engine in ENGINES
        },
        "accuracy_difference": mean_interval([a["accuracy_after"] - b["accuracy_after"] for a, b in pairs]),
        "throughput_ratio": mean_interval([a["samples_per_s"] / b["samples_per_s"] for a, b in pairs]),
    }


def print_table(result: dict[str, Any]) -> None:
    """The comparison, as text."""
    print(f"\n{'engine':14}{'accuracy':>18}{'samples/s':>18}{'tokens/s':>20}")
    for engine, values in result["engines"].items():
        accuracy, samples, tokens = (values[key] for key in ("accuracy_after", "samples_per_s", "tokens_per_s"))
        print(f"{engine:14}{accuracy[0]:10.3f} ±{accuracy[1]:6.3f}{samples[0]:10.1f} ±{samples[1]:6.1f}"
              f"{tokens[0]:11.0f} ±{tokens[1]:7.0f}")  # fmt: skip
    difference, ratio = result["accuracy_difference"], result["throughput_ratio"]
    print(f"sglang against embedded: accuracy {difference[0]:+.3f} ± {difference[1]:.3f}, "
          f"samples/s x {ratio[0]:.2f} ± {ratio[1]:.2f} (paired, 95 % interval)")  # fmt: skip


if __name__ == "__main__":
    main()
