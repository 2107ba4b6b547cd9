"""Does the quickstart learn on every seed, and does it stay unchanged if nothing can be learned?

    python -m benchmarks.quickstart                  seeds 1 to 5 and two controls, about 15 minutes on two cores
    python -m benchmarks.quickstart --quick          seed 1 alone

Controls, on two seeds (--control-seeds): learning rate 0, and random rewards. Accuracy is greedy, on held-out prompts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measured import INTEGERS, Measured, add_options
from benchmarks.publishing import result_path
from benchmarks.runs import command_of, write

COIN = "import random\n\ndef toss(row, response, **info):\n    return random.Random(response).choice([0.0, 1.0])\n"
CONTROLS = {
    "lr_zero": ["trainer.optimizer.lr=0"],
    "random_reward": ["reward.scorers=[{kind: 'coin:toss'}, {kind: running_sum, weight: 0}]"],
}
KEYS = ("accuracy_before", "accuracy_after", "eval_prompts", "wall_s", "prepare_s", "train_wall_s", "samples_per_s",
        "tokens_per_s", "trainer_wait_share", "rollout_idle_share", "staleness_mean", "staleness_max",
        "audit")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=INTEGERS, default="1,2,3,4,5")
    parser.add_argument("--control-seeds", type=lambda text: INTEGERS(text) if text else [], default="1,2")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    parser.set_defaults(config="")
    options = parser.parse_intermixed_args()
    path = None if options.quick else result_path("quickstart", options)
    seeds = [1] if options.quick else options.seeds
    controls = [] if options.quick else options.control_seeds
    measured = Measured.of("quickstart", options)
    rows: list[dict[str, Any]] = []
    runs_dir = options.runs_dir.resolve()
    config = str(Path("configs/quickstart.yaml").resolve())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "coin.py").write_text(COIN)
        os.chdir(folder)
        for kind, wanted, extra in [("learning", seeds, []), *((kind, controls, CONTROLS[kind]) for kind in CONTROLS)]:
            for seed in wanted:
                settings = [f"seed={seed}", *extra, *options.overrides]
                summary = measured.job(config, settings, runs_dir)
                rows.append({"kind": kind, "seed": seed, **{key: summary[key] for key in (*KEYS, "measured")}})
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        os.chdir(runs_dir)
    after = [row["accuracy_after"] for row in rows if row["kind"] == "learning"]
    print(f"\naccuracy after: mean {statistics.fmean(after):.3f}, lowest {min(after):.3f}, over {len(after)} seeds")
    if not options.quick:
        path = write("quickstart", command_of("quickstart"), {"rows": rows}, path)
        print(f"written to {path}")
    measured.finish()


if __name__ == "__main__":
    main()
