"""Does the report warn of a divergence before the accuracy falls? Runs with too high a learning rate.

    python -m benchmarks.divergence                 2 losses x 5 seeds, driven too hard and sound: half an hour
    python -m benchmarks.divergence --quick         one seed, one loss; writes nothing
    python -m benchmarks.divergence --seeds 1,2 --lr 4e-3

The staleness benchmark's small quickstart without a bound on staleness, at five times its learning rate, evaluated
every other step. Each run is read again step by step, as `areal-like report` would have read it at that step, but
without its evaluations. `warned`: the first step at which the step metrics alone cause a finding about the policy.
`fell`: the first evaluation that is a fifth, and more than chance, below the best one so far. For each there is also a
run at a sound learning rate and bound, which must cause no finding. Rules and thresholds were chosen on seeds 1 to 19;
seeds 20 to 24, the default, had not been used for any of them when they were published. To change a rule, use later
seeds.

Every other version is evaluated, so a fall may have occurred one version before the evaluation that shows it. A fall
may be temporary: compare `last` with `best`.

`aligned`: the largest cosine that five consecutive measurements of `gradient_cosine` reached. Where it is at least
COSINE_LARGE of controller/report/learning.py, the report had the finding `gradients_aligned`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measured import INTEGERS, Measured, add_options
from benchmarks.publishing import result_path
from benchmarks.runs import command_of, train, write
from benchmarks.staleness import LOSSES, MINI_BATCHES, OWN_LOSSES, SMALL, limit
from benchmarks.warning import warning_of
from controller.report.data import RunData
from controller.report.learning import COSINE_MEASURED, accuracy_fall
from controller.run_folder.run_folder import RunFolder

CONFIG = "configs/quickstart.yaml"
HARD, SOUND = "5e-4", "1e-4"
"""Learning rates."""
EVAL_EVERY = 2
SEEDS = "20,21,22,23,24"
"""Default seeds: no rule was chosen on them, nor changed after seeing them."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=INTEGERS, default=SEEDS)
    parser.add_argument("--lr", default=HARD, help="learning rate that is too high")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    seeds = [1] if options.quick else options.seeds
    measured = Measured.of("divergence", options)
    rows = []
    for loss in OWN_LOSSES[-1:] if options.quick else OWN_LOSSES:
        for seed, is_hard in [(seed, is_hard) for is_hard in (True, False) for seed in seeds]:
            settings = overrides(loss, seed, options.lr if is_hard else SOUND, "unbounded" if is_hard else "2")
            row = measured.row([CONFIG, *settings], partial(measure, settings, options.runs_dir))
            rows.append({"loss": loss, "seed": seed, "is_driven_too_hard": is_hard, **row})
            print(line(rows[-1]), flush=True)
    if not options.quick:
        command = command_of("divergence")
        result = {"learning_rate": options.lr, "rows": rows}
        print(f"written to {write('divergence', command, result, result_path('divergence', options))}")
    measured.finish()


def overrides(loss: str, seed: int, rate: str, bound: str) -> list[str]:
    """Overrides of one run."""
    return [
        f"seed={seed}", *SMALL, f"trainer.mini_batches={MINI_BATCHES}", *LOSSES[loss], f"trainer.optimizer.lr={rate}",
        *limit(bound), f"eval.every_steps={EVAL_EVERY}", "trainer.gradient_cosine.every_steps=1",
        "metrics.report=false",
    ]  # fmt: skip


def measure(settings: list[str], runs_dir: Path) -> Row:
    """Run one job and return at which steps the report warned and the accuracy fell."""
    folder = Path(train(CONFIG, settings, runs_dir)["folder"])
    return {"folder": folder.name, **reported_when(RunData.load(RunFolder(folder), max_samples=1))}


def reported_when(data: RunData) -> Row:
    """Step and text of the first finding about the policy, and the step at which the accuracy had fallen."""
    warned, words = warning_of(data)
    return {
        "warned": warned, "words": words, "aligned": aligned(data),
        "fell": next((row["version"] for row in data.evals if has_fallen(data, row["version"])), None),
        "best": max(row["accuracy"] for row in data.evals), "last": data.evals[-1]["accuracy"],
        "evals": [(row["version"], row["accuracy"]) for row in data.evals],
    }  # fmt: skip


def aligned(data: RunData) -> float | None:
    """The largest cosine that as many measurements in a row reached as the report judges; None if there are fewer."""
    cosines = [row["gradient_cosine"] for row in data.steps if row.get("gradient_cosine") is not None]
    spans = [cosines[end - COSINE_MEASURED : end] for end in range(COSINE_MEASURED, len(cosines) + 1)]
    return max(map(min, spans), default=None)


def has_fallen(data: RunData, version: int) -> bool:
    """Whether the evaluation of a version is below the best until then, by a fifth and by more than chance."""
    fall = accuracy_fall(replace(data, evals=[row for row in data.evals if row["version"] <= version]))
    return fall is not None and fall.is_notable


def line(row: Row) -> str:
    """One run as text."""
    name = f"{row['loss']:10} seed {row['seed']}  {'too hard' if row['is_driven_too_hard'] else 'sound':9}"
    warned, fell = (f"step {row[key]}" if row[key] is not None else "never" for key in ("warned", "fell"))
    return f"{name} warned: {warned:8} fell: {fell:8} accuracy {row['best']:.3f} -> {row['last']:.3f}  {row['words']}"


if __name__ == "__main__":
    main()
