"""Does `areal-like data labels` find planted wrong labels in the samples of a run?

    python -m benchmarks.label_noise                          the quickstart's task and model, some minutes on two cores
    python -m benchmarks.label_noise --run RUN --truth FILE   of a run that was trained before on the file of rows

400 distinct sums of at most six digits are written to a file, 5 % of them with a wrong label. The quickstart is trained
on them for 45 steps of 24 groups of 8 answers, with warm start and reward by these labels: the policy never sees the
right ones. Then the rows that the command lists with its default options are compared with the planted ones.

Prints one line of JSON, and writes it to label_noise.json next to the runs: `share_listed` is the share of wrong labels
that are listed (wanted: at least 0.8), `listed_per_wrong` the number of listed rows for each wrong one (at most 2).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from areal_like.tasks import running_sum
from benchmarks import runs
from benchmarks.publishing import RUNS
from controller.run_folder.run_folder import RunFolder
from controller.runs.labels.answers import answers_of_run, reader_of
from controller.runs.labels.defaults import MIN_AGREEMENT, MIN_ANSWERS, MOST
from controller.runs.labels.disputed import find_disputed

NUM_ROWS = 400
SHARE_WRONG = 0.05
MAX_TERMS = 6
SETTINGS = [
    f"data.eval.options.max_terms={MAX_TERMS}", "sampling.max_new_tokens=48", "num_steps=45", "groups_per_step=24",
    "trainer.mini_batches=2", "trainer.optimizer.schedule=constant", "eval.every_steps=0", "data.eval.limit=200",
    "metrics.report=false", f"warm_start.data.options.max_terms={MAX_TERMS}", "warm_start.sft.steps=400",
]  # fmt: skip
"""The quickstart on short sums, in an eighth of its tokens."""


def planted_rows(seed: int) -> list[dict[str, Any]]:
    """Rows with `id`, `prompt` and `answer`; every wrong one differs from the right digit."""
    rows: dict[str, dict[str, Any]] = {}
    for row in running_sum.rows(seed, "train", options={"max_terms": MAX_TERMS}):
        rows.setdefault(row["prompt"], {"id": len(rows), "prompt": row["prompt"], "answer": row["answer"]})
        if len(rows) == NUM_ROWS:
            break
    chance = random.Random(f"label noise/{seed}")
    for row in chance.sample(list(rows.values()), round(SHARE_WRONG * NUM_ROWS)):
        row["answer"] = str((int(row["answer"]) + chance.randrange(1, 10)) % 10)
    return list(rows.values())


def wrong_lines(truth: Path) -> set[int]:
    """Lines of a file of rows, from 1, whose label is not the sum."""
    rows = [json.loads(line) for line in truth.read_text().splitlines()]
    right = [running_sum.solve(row["prompt"]).rpartition("#")[2] for row in rows]
    return {number for number, (row, answer) in enumerate(zip(rows, right, strict=True), 1) if row["answer"] != answer}


def measure(run: Path, truth: Path) -> dict[str, Any]:
    """Compare what is listed of a run with the wrong labels of its file."""
    wrong = wrong_lines(truth)
    rows, first_version, num_gone = answers_of_run(RunFolder(run), reader_of(""), from_version=None, most=MOST)
    found = find_disputed(rows, min_answers=MIN_ANSWERS, min_agreement=MIN_AGREEMENT)
    listed = {int(one.where.rpartition(":")[2]) for one in found.disputed}
    judged = {int(row.where.rpartition(":")[2]) for row in rows}
    return {
        "wrong": len(wrong), "listed": len(listed), "right_among_listed": len(listed - wrong),
        "share_listed": len(listed & wrong) / len(wrong), "listed_per_wrong": len(listed) / len(wrong),
        "rows": NUM_ROWS, "rows_with_answers": len(judged), "wrong_with_answers": len(wrong & judged),
        "first_version": first_version, "answers_gone": num_gone,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, default=RUNS, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1, help="of the rows and their wrong labels (1)")
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run that was trained on --truth before")
    parser.add_argument("--truth", type=Path, metavar="FILE", help="its file of rows")
    options = parser.parse_args()
    if (options.run is None) != (options.truth is None):
        parser.error("--run and --truth need each other")
    runs_dir = options.runs_dir.resolve()
    accuracy: Any = None
    if options.run is None:
        runs_dir.mkdir(parents=True, exist_ok=True)
        truth = runs_dir / f"label_noise_{options.seed}.jsonl"
        truth.write_text("".join(json.dumps(row) + "\n" for row in planted_rows(options.seed)))
        words = [f"data.train={{path: {truth}}}", f"name=label-noise-{options.seed}"]
        done = runs.train("quickstart", [*words, *SETTINGS], runs_dir)
        run, accuracy = Path(done["folder"]), done["accuracy_after"]
    else:
        run, truth = options.run, options.truth
    result = {"seed": options.seed, "accuracy": accuracy, **measure(run, truth)}
    print(json.dumps(result))
    (runs_dir / "label_noise.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
