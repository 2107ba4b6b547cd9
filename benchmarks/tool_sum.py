"""Does one task learn equally through a workflow, an environment, and a program of the user?

    python -m benchmarks.tool_sum                  three jobs on seeds 1 and 2, about half an hour on two quiet cores
    python -m benchmarks.tool_sum --quick          a few steps of each on seed 1; writes nothing

The task is running sums with a calculator (areal_like/tasks/tool_sum.py): `workflow` is configs/tool_sum.yaml,
`environment` configs/environment_tool_sum.yaml, and `proxy` configs/agent_tool_sum.yaml, an unmodified program with
OpenAI's SDK. The three have the same model but for its vocabulary, demonstrations, training prompts, samples per step,
steps, optimizer, and the same 200 held-out prompts, so that accuracies of one seed can be compared in pairs. What
differs: `proxy` is a chat, with a token per marker and a longer context.

Accuracy is greedy. `seconds` is the time from the end of the warm start to the end of an evaluation; it includes the
start of the processes and all evaluations before it. TARGET is reached with the first evaluation that is as high.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.metrics import read_jsonl
from benchmarks.folders import REPOSITORY
from benchmarks.measured import INTEGERS, Measured, add_options
from benchmarks.publishing import result_path
from benchmarks.runs import command_of, train, write
from controller.run_folder.run_folder import RunFolder

QUESTION = "tool_sum"
JOBS = {"workflow": "tool_sum", "environment": "environment_tool_sum", "proxy": "agent_tool_sum"}
"""Shipped configs; differences of accuracy are from the first one."""
TARGET = 0.95
QUICK = (
    "num_steps=2", "groups_per_step=4", "warm_start.sft.steps=20", "warm_start.sft.batch_size=16",
    "data.eval.limit=8", "eval.every_steps=1",
)  # fmt: skip
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=INTEGERS, default="1,2")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parser.parse_intermixed_args()
    path = None if options.quick else result_path(QUESTION, options)
    measured = Measured.of(QUESTION, options)
    runs_dir = options.runs_dir.resolve()
    rows: list[Row] = []
    for seed in [1] if options.quick else options.seeds:
        for job in JOBS:
            settings = [f"seed={seed}", "metrics.report=false", *(QUICK if options.quick else ()), *options.overrides]
            config = str(REPOSITORY / "configs" / f"{JOBS[job]}.yaml")
            row = measured.row([config, *settings], lambda c=config, s=settings: run(c, s, runs_dir))  # type: ignore[misc]
            rows.append({"job": job, "seed": seed, **row})
            print(words(rows[-1]), flush=True)
    for line in paired(rows):
        print(f"seed {line['seed']}: {line['job']} against {next(iter(JOBS))}: {line['difference']:+.3f} at the end")
    if not options.quick:
        result = {"target": TARGET, "rows": rows, "paired": paired(rows)}
        print(f"written to {write(QUESTION, command_of(QUESTION), result, path)}")
    measured.finish()


def run(config: str, settings: Sequence[str], runs_dir: Path) -> Row:
    """Run one job and return its curve. Raises SystemExit if it fails or its audit finds something."""
    summary = train(config, settings, runs_dir)
    if summary["audit"] != "clean":
        raise SystemExit(f"the audit of {summary['folder']} says: {summary['audit']}")
    folder = RunFolder(Path(summary["folder"]))
    began_s = json.loads(folder.state.read_text())["created_s"] + summary["prepare_s"]
    curve = curve_of([row for row in read_jsonl(folder.metrics) if row.get("kind") == "eval"], began_s)
    return {
        "curve": curve, **reached(curve), "prepare_s": summary["prepare_s"], "train_wall_s": summary["train_wall_s"],
        "samples": summary["samples_consumed"],
    }  # fmt: skip


def curve_of(evals: Sequence[Mapping[str, Any]], began_s: float) -> list[Row]:
    """Accuracy by step, from rows of metrics.jsonl. `began_s`: time of the end of the warm start."""
    return [
        {
            "step": row["version"], "accuracy": row["accuracy"], "prompts": row["num_scored"],
            "seconds": round(row["time_s"] - began_s, 1),
        }
        for row in sorted(evals, key=lambda row: row["version"])
    ]  # fmt: skip


def reached(curve: Sequence[Mapping[str, Any]]) -> Row:
    """Step and seconds of the first evaluation that reaches TARGET; None if none does."""
    first = next((point for point in curve if point["accuracy"] >= TARGET), {"step": None, "seconds": None})
    return {"reached_step": first["step"], "reached_s": first["seconds"]}


def paired(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Differences of the accuracy after the last step from that of the first job, of the same seed."""
    last = {(row["job"], row["seed"]): row["curve"][-1]["accuracy"] for row in rows}
    base, *others = JOBS
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [
        {"job": job, "seed": seed, "difference": last[job, seed] - last[base, seed]} for seed in seeds for job in others
    ]


def words(row: Mapping[str, Any]) -> str:
    """One job as text."""
    points = "  ".join(f"{point['step']}: {point['accuracy']:.3f}" for point in row["curve"])
    at = "not reached" if row["reached_step"] is None else f"step {row['reached_step']}, {row['reached_s']:.0f} s"
    return f"{row['job']:12} seed {row['seed']}  {points}  {TARGET}: {at}"


if __name__ == "__main__":
    main()
