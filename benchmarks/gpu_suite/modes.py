"""Part `modes`: asynchronous against synchronous on one GPU that engine and trainer share, as two processes.

The quickstart's model with random weights (its answers then have geometric lengths), without evaluations: samples per
second are compared. In `sync` one of the two works at a time, in `one_step_off` and `async` both. Kernels of two
processes take turns on one GPU, so the gain is the time in which one process alone would leave it idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu_suite.case import Beyond, Context
from benchmarks.gpu_suite.quickstart import on_device, summary_of

MODES = ("sync", "one_step_off", "async")
MOST_STALE = {"sync": 0, "one_step_off": 1, "async": 2}
KEYS = ("samples_per_s", "tokens_per_s", "trainer_wait_share", "rollout_idle_share", "staleness_max", "steps", "wall_s")
SAME = ["warm_start=null", "data.eval=null", "eval.every_steps=0", "metrics.report=false", "trainer.optimizer.lr=0"]
TINY = ["num_steps=3", "groups_per_step=4", "group_size=2", "rollout.engine.num_slots=8", "data.train.limit=200"]


def run(context: Context) -> None:
    """Run every mode once (quick) or three times in turn."""
    steps = 3 if context.is_tiny else 15 if context.is_quick else 40
    speeds: dict[int, float] = {}
    for turn in range(1 if context.is_quick else 3):
        for mode in MODES:
            case = mode if context.is_quick else f"{mode}, {turn + 1}"
            context.run("modes", case, 15, partial(_job, context, mode, steps, turn, speeds))


def _job(context: Context, mode: str, steps: int, turn: int, speeds: dict[int, float]) -> Mapping[str, Any]:
    settings = [f"name=gpu_suite_{mode}", f"mode={mode}", f"num_steps={steps}", *SAME, *on_device(context)]
    summary = summary_of(context, [*settings, *(TINY if context.is_tiny else [])])
    row = {key: summary.get(key) for key in KEYS}
    if mode == "sync":
        speeds[turn] = summary["samples_per_s"]
    row["over_sync"] = summary["samples_per_s"] / speeds[turn] if speeds.get(turn) else None
    if summary["audit"] != "clean" or summary["staleness_max"] > MOST_STALE[mode]:
        raise Beyond(f"the audit says {summary['audit']}, staleness reached {summary['staleness_max']}", row)
    return row
