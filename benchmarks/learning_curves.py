"""Do the shipped multi-turn jobs learn? The greedy accuracy of finished runs over their steps.

    areal-like train guess_number
    python -m benchmarks.learning_curves runs/guess_number                    one or more runs
    python -m benchmarks.learning_curves runs/guess_number --quick            prints; writes nothing

A run evaluates on held-out prompts before the first step, every `eval.every_steps` steps, and at the end. This
benchmark only collects the evaluations of runs whose audit is clean. A curve replaces an older one of a run with the
same name; other curves are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from areal_like.metrics import read_jsonl
from benchmarks import folders
from benchmarks.runs import command_of, parts_with, write
from controller.run_folder.run_folder import RunFolder

QUESTION = "learning_curves"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", type=Path, help="the folder of a finished run")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    options = parser.parse_args()
    path = folders.RESULTS / f"{QUESTION}.json"
    for folder in options.run:
        curve = curve_of(folder)
        shown = "  ".join(f"{row['step']}: {row['accuracy']:.3f}" for row in curve["points"])
        print(f"{folder.name}  {shown}")
        if not options.quick:
            parts = parts_with(path, folder.name, f"areal-like train {folder.name}", curve)
            write(QUESTION, command_of(QUESTION), {"parts": parts})


def curve_of(folder: Path) -> dict[str, Any]:
    """Accuracy by step, and the duration of the run. Raises SystemExit if it has not ended successfully."""
    run = RunFolder(folder)
    if not run.summary.is_file():
        raise SystemExit(f"{folder} is not the folder of a finished run")
    summary = json.loads(run.summary.read_text())
    if summary.get("audit") != "clean":
        raise SystemExit(f"the audit of {folder} says: {summary.get('audit')}")
    points = [
        {"step": row["version"], "accuracy": row["accuracy"], "prompts": row["num_scored"]}
        for row in read_jsonl(run.metrics) if row.get("kind") == "eval"
    ]  # fmt: skip
    by_step = {point["step"]: point for point in points}  # a resumed run may have evaluated a version again
    return {"points": [by_step[step] for step in sorted(by_step)], "wall_s": summary["wall_s"]}


if __name__ == "__main__":
    main()
