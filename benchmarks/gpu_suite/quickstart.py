"""Part `quickstart`: the project's main job with its real processes, engine and trainer on one GPU.

Runs twice: in float32, and in bfloat16 (published weights, engine and trainer's arithmetic). A run fails if its audit
is not clean, if staleness exceeds its bound, or if it does not learn: accuracy on held-out prompts must rise by 0.1.
With --quick it trains for half the steps and evaluates on fewer prompts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.folders import REPOSITORY
from benchmarks.gpu_suite.case import Beyond, Context, Cut
from benchmarks.runs import train

CONFIG = str(REPOSITORY / "configs" / "quickstart.yaml")
MAX_STALENESS = 2
MIN_GAIN = 0.1
LEAVE_S = 3.0
"""Seconds before the part's end at which a job is stopped, so that its row can be written."""
KEYS = (
    "accuracy_before", "accuracy_after", "eval_prompts", "steps", "samples_per_s", "tokens_per_s", "trainer_wait_share",
    "rollout_idle_share", "staleness_mean", "staleness_max", "audit", "prepare_s", "train_wall_s", "wall_s",
)  # fmt: skip
QUICK = ["num_steps=40", "eval.every_steps=0", "data.eval.limit=400"]
TINY = [
    "num_steps=2", "eval.every_steps=0", "data.eval.limit=8", "warm_start.sft.steps=5", "warm_start.sft.batch_size=8",
    "groups_per_step=4", "group_size=2", "rollout.engine.num_slots=8",
]  # fmt: skip
BFLOAT16 = ["model.dtype=bfloat16", "trainer.precision=bfloat16"]


def on_device(context: Context) -> list[str]:
    """Engine and trainer on the suite's one device."""
    device = "cpu" if context.device == "cpu" else "cuda"
    return [f"rollout.engine.device={device}", f"trainer.device={device}"]


def overrides(context: Context, precision: str) -> list[str]:
    """Overrides of the quickstart's configuration."""
    (device,) = {key.rpartition("=")[2] for key in on_device(context)}
    form = TINY if context.is_tiny else QUICK if context.is_quick else []
    return [
        f"name=gpu_suite_{precision}", *on_device(context), f"warm_start.sft.device={device}", *form,
        *(BFLOAT16 if precision == "bfloat16" else []),
    ]  # fmt: skip


def run(context: Context) -> None:
    """Run both precisions; the second only if time is left."""
    for precision in ("float32", "bfloat16"):
        needs_s = 25 if context.is_tiny else 60 if context.is_quick else 120
        context.run("quickstart", precision, needs_s, partial(_job, context, precision))


def _job(context: Context, precision: str) -> Mapping[str, Any]:
    summary = summary_of(context, overrides(context, precision))
    row = {"precision": precision, **{key: summary.get(key) for key in KEYS}}
    problems = faults(row, must_learn=not context.is_tiny)
    if problems:
        raise Beyond("; ".join(problems), row)
    return row


def summary_of(context: Context, settings: Sequence[str]) -> Mapping[str, Any]:
    """Run a job with these overrides and return its summary. Raises Cut if time runs out, RuntimeError with the end of
    the job's output."""
    runs_dir: Path = context.scratch / "runs"
    timeout_s = context.left_s - LEAVE_S
    try:
        return train(CONFIG, settings, runs_dir, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise Cut(f"still running after {timeout_s:.0f} s") from error
    except SystemExit as error:
        print(error)
        raise RuntimeError(" ".join(str(error).split())[-300:]) from error


def faults(row: Mapping[str, Any], *, must_learn: bool) -> list[str]:
    """Faults of a finished run."""
    found = []
    if row["audit"] != "clean":
        found.append(f"the audit says {row['audit']}")
    if row["staleness_max"] is None or row["staleness_max"] > MAX_STALENESS:
        found.append(f"staleness {row['staleness_max']} where {MAX_STALENESS} is the bound")
    before, after = row["accuracy_before"], row["accuracy_after"]
    if before is None or after is None:
        found.append("no accuracy")
    elif must_learn and after < before + MIN_GAIN:
        found.append(f"accuracy went from {before} to {after}")
    return found
