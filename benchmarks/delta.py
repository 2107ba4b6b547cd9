"""How large is the lossless delta from one version to the next, over real steps of a real job?

    python -m benchmarks.delta                 bfloat16 and float32, learning rates 1e-6, 1e-5, 1e-4: about 10 minutes
    python -m benchmarks.delta --quick         one run of each dtype, 6 steps
    python -m benchmarks.delta configs/gsm8k_8b_8gpu.yaml model.path=...      your own model

Each run is a complete job (generation, rewards, AdamW) with deltas enabled and a constant learning rate after a warm
start; the sizes are those that the trainer published (publish_bytes of metrics.jsonl). The trainer's own parameters are
float32 throughout: with bfloat16 the published copy changes only where a parameter has crossed a rounding boundary.

The size of AdamW's steps is about the learning rate, whatever the gradient, but the magnitude of the weights differs
from model to model. The figures describe this job at that learning rate; other models may differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measured import TEXTS, add_job, parse_job
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, train, write

SETTINGS = (
    "trainer.weights.delta.full_every=1000", "trainer.weights.deadline_s=300", "trainer.optimizer.schedule=constant",
    "trainer.optimizer.warmup_steps=0", "eval.at_start=false", "eval.every_steps=0", "data.eval.limit=16",
    "metrics.report=false", "metrics.trace=false", "groups_per_step=12", "group_size=4",
)  # fmt: skip

CONFIG = "configs/quickstart.yaml"
"""Config of the published figures."""

COLUMNS = ("dtype", "lr", "full_bytes", "median_bytes", "min_bytes", "max_bytes", "share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--lrs", type=TEXTS, default="1e-6,1e-5,1e-4")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    parser.add_argument("--out", type=Path, default=None)
    add_replace(parser)
    options = parse_job(parser)
    rates = ["1e-5"] if options.quick else options.lrs
    steps = 6 if options.quick else options.steps
    rows = []
    print("  ".join(f"{name:>12}" for name in COLUMNS))
    for dtype in options.dtypes.split(","):
        for rate in rates:
            row = measure(options.config or CONFIG, dtype, rate, steps, options.overrides, options.runs_dir)
            rows.append(row)
            figures = (f"{row[name]:12,.0f}" for name in COLUMNS[2:6])
            print("  ".join([f"{dtype:>12}", f"{rate:>12}", *figures, f"{row['share']:12.2%}"]), flush=True)
    if not options.quick or options.out:
        path = options.out or result_path("delta", options)
        print("written to", write("delta", command_of("delta"), {"rows": rows}, path))


def measure(config: str, dtype: str, rate: str, steps: int, overrides: list[str], runs_dir: Path) -> dict[str, Any]:
    """Run one job and return the bytes of every version after the first, which is complete."""
    own = [f"model.dtype={dtype}", f"trainer.optimizer.lr={rate}", f"num_steps={steps}", *SETTINGS, *overrides]
    summary = train(config, own, runs_dir)
    lines = (Path(summary["folder"]) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    sizes = [event["publish_bytes"] for event in events if event.get("kind") == "step"]
    setup = json.loads((Path(summary["folder"]) / "trainer.json").read_text())
    full_bytes = setup["parameters"] * (2 if dtype == "bfloat16" else 4)
    median = statistics.median(sizes)
    return {
        "dtype": dtype, "lr": float(rate), "steps": len(sizes), "full_bytes": full_bytes, "median_bytes": median,
        "min_bytes": min(sizes), "max_bytes": max(sizes), "share": median / full_bytes, "sizes": sizes,
        "audit": summary["audit"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
