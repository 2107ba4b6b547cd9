"""Part `quickstart`: the whole quickstart job with the line of configuration of each objective, as docs/algorithms.md
and docs/lora.md give it. Distillation has the first job of the same seed as its teacher. With `--variants` some jobs
are a part of their own, named after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.metrics import read_jsonl
from benchmarks.measured import Measured
from benchmarks.objectives.task import CONFIG
from benchmarks.runs import train
from benchmarks.spreads import mean_interval
from controller.run_folder.run_folder import RunFolder

OFF = 'trainer.loss.weight.mode="off"'
BEHAVIOUR = ("trainer.loss.proximal=behaviour", OFF)
TEACHER = "TEACHER"
JOBS: Mapping[str, Sequence[str]] = {
    "decoupled_ppo": (),
    "gspo": ("trainer.loss.kind=gspo", "trainer.loss.aggregation=sequence_mean"),
    "cispo": ("trainer.loss.kind=cispo",),
    "sapo": ("trainer.loss.kind=sapo", "trainer.loss.aggregation=sequence_mean"),
    "dppo": ("trainer.loss.kind=dppo", *BEHAVIOUR),
    "vespo": ("trainer.loss.kind=vespo", *BEHAVIOUR),
    "bapo": ("trainer.loss.kind=bapo", *BEHAVIOUR),
    "ppo_with_critic": ("trainer.advantage.kind=gae", "trainer.critic.optimizer.lr=1.0e-3"),
    "lora_rank_16": ("trainer.lora.rank=16", "trainer.optimizer.lr=1e-3"),
    "online_dpo": ("trainer.advantage.kind=online_dpo", OFF, "trainer.loss.aggregation=constant"),
    "distillation": ("trainer.advantage.kind=distillation", f"trainer.teacher.path={TEACHER}"),
}
"""Overrides of the quickstart by name."""
KEYS = ("accuracy_before", "accuracy_after", "staleness_mean", "audit")
Row = dict[str, Any]


def measure(measured: Measured, names: Sequence[str], seeds: Sequence[int], runs_dir: Path) -> Row:
    """Run every job; a row each with the accuracies of its evaluations."""
    rows: list[Row] = []
    for seed in seeds:
        done: dict[str, Row] = {}
        for name in names:
            rows.append({"job": name, "seed": seed, **_job(measured, name, seed, runs_dir, done)})
            shown = "  ".join(f"{step}: {accuracy:.3f}" for step, accuracy in rows[-1]["curve"])
            print(f"{name:16} seed {seed}  {shown}", flush=True)
    summary = {name: _summary([row for row in rows if row["job"] == name]) for name in names}
    return {
        "seeds": list(seeds), "jobs": {name: list(JOBS[name]) for name in names}, "summary": summary, "rows": rows,
    }  # fmt: skip


def _summary(rows: Sequence[Row]) -> Row:
    """Mean and half width of its 95 % interval over the seeds of a job, before and after training."""
    ends = {"before": 0, "after": -1}
    return {name: list(mean_interval([row["curve"][place][1] for row in rows])) for name, place in ends.items()}


def _job(measured: Measured, name: str, seed: int, runs_dir: Path, done: dict[str, Row]) -> Row:
    """The row of a job of this seed, run once. done: rows by name."""
    if name in done:
        return done[name]
    teacher = ""
    if any(TEACHER in one for one in JOBS[name]):
        teacher = str(runs_dir / _job(measured, "decoupled_ppo", seed, runs_dir, done)["folder"] / "final")
    settings = [f"seed={seed}", "metrics.report=false", *(one.replace(TEACHER, teacher) for one in JOBS[name])]

    def run() -> Row:
        summary = train(str(CONFIG), settings, runs_dir)
        folder = Path(summary["folder"])
        evals = [row for row in read_jsonl(RunFolder(folder).metrics) if row.get("kind") == "eval"]
        curve = [(row["version"], row["accuracy"]) for row in evals]
        return {"folder": folder.name, "curve": curve, **{key: summary[key] for key in KEYS}}

    done[name] = measured.row([str(CONFIG), *settings], run)
    return done[name]
