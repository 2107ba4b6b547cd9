"""Does training from files learn, on every seed: supervised, DPO, IPO, a reward model?

    python -m benchmarks.preference                  seeds 1 to 5, about five minutes of processor time
    python -m benchmarks.preference --quick          seed 1 alone

The jobs are the shipped configs (configs/offline) on rows that depend on the seed: words in lower case that must be
written in upper case; the rejected answer of a pair has one wrong letter. Held-out words do not occur in training. The
seed also determines the model, of 0.2M parameters, and the order of the rows.

Metrics, on 200 held-out rows: for `sft` exact match (greedy decoding gives the word and ends); for the others the share
of pairs that are judged correctly, 0.5 before training. Control: nothing can be learned from pairs whose answers are
swapped at random.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from areal_like.metrics import read_jsonl
from benchmarks.measured import INTEGERS, Measured, add_options
from benchmarks.publishing import result_path
from benchmarks.runs import command_of, write
from benchmarks.spreads import spread_of
from controller.config.offline_config import Objective
from controller.config.offline_loading import load_offline
from controller.run_folder.run_folder import RunFolder
from controller.wiring.offline import offline_spec

LETTERS = "abcdefghij"
NUM_TRAIN, NUM_HELD_OUT = 500, 200
KINDS: dict[str, tuple[Objective, str, bool]] = {
    "sft": ("sft", "", False),
    "dpo": ("dpo", "sigmoid", False),
    "ipo": ("dpo", "ipo", False),
    "reward model": ("reward_model", "", False),
    "dpo, control": ("dpo", "sigmoid", True),
    "reward model, control": ("reward_model", "", True),
}
"""Objective, loss of `dpo`, and whether the training pairs are swapped at random."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=INTEGERS, default="1,2,3,4,5")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    path = None if options.quick else result_path("preference", options)
    measured = Measured.of("preference", options)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for seed in [1] if options.quick else options.seeds:
            folder = options.runs_dir.resolve() / f"preference-{kind.replace(', ', '-').replace(' ', '-')}-{seed}"
            row = measured.row(["preference", kind, seed], lambda k=kind, s=seed, f=folder: run(k, s, f))  # type: ignore[misc]
            rows.append({"kind": kind, "seed": seed, **row})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    spreads = {kind: spread_of([row["accuracy_after"] for row in rows if row["kind"] == kind]) for kind in KINDS}
    for kind, spread in spreads.items():
        print(f"{kind}: after {spread['mean']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})")
    if not options.quick:
        print("written to", write("preference", command_of("preference"), {"rows": rows, "accuracy": spreads}, path))
    measured.finish()


def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once in this process and return the metrics before and after, and the processor time."""
    import torch

    from trainer.offline.loop import OfflineTraining

    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    objective, loss, is_swapped = KINDS[kind]
    files = write_rows(folder, seed, is_paired=objective != "sft", is_swapped=is_swapped)
    overrides = [f"seed={seed}", *(f"data.{name}={file}" for name, file in files.items())]
    if loss:
        overrides.append(f"dpo.loss={loss}")
    config = load_offline(f"offline/{objective}", overrides).config
    started_s = time.process_time()
    OfflineTraining(offline_spec(config, RunFolder(folder), objective, f"preference-{seed}")).run()
    cpu_s = time.process_time() - started_s
    evals = [row for row in read_jsonl(folder / "metrics.jsonl") if row["kind"] == "eval"]
    before, after = evals[0], evals[-1]
    shown = [name for name in ("accuracy", "loss", "margin") if name in after]
    figures = {f"{name}_{when}": row[name] for name in shown for when, row in (("before", before), ("after", after))}
    return {**figures, "steps": after["version"], "eval_rows": int(after["num_scored"]), "cpu_s": round(cpu_s, 1)}


def write_rows(folder: Path, seed: int, *, is_paired: bool, is_swapped: bool) -> dict[str, Path]:
    """Write files of training and held-out rows drawn from the seed. is_swapped: swap training pairs at random."""
    draw, coin = random.Random(seed), random.Random(f"coin {seed}")
    words: list[str] = []
    while len(words) < NUM_TRAIN + NUM_HELD_OUT:
        word = "".join(draw.choice(LETTERS) for _ in range(draw.randint(3, 5)))
        if word not in words:
            words.append(word)
    parts = {"train": words[:NUM_TRAIN], "eval": words[NUM_TRAIN:]}
    files = {}
    for name, chosen in parts.items():
        rows = [_pair(word, draw) if is_paired else _demonstration(word) for word in chosen]
        if is_swapped and name == "train":
            rows = [_swapped(row) if coin.random() < 0.5 else row for row in rows]
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def _demonstration(word: str) -> dict[str, str]:
    return {"prompt": f"{word}>", "completion": word.upper()}


def _pair(word: str, draw: random.Random) -> dict[str, str]:
    wrong, place = list(word.upper()), draw.randrange(len(word))
    wrong[place] = draw.choice([letter for letter in LETTERS.upper() if letter != wrong[place]])
    return {"prompt": f"{word}>", "chosen": word.upper(), "rejected": "".join(wrong)}


def _swapped(row: dict[str, str]) -> dict[str, str]:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


if __name__ == "__main__":
    main()
