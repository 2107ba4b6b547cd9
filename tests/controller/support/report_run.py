"""Folders of made-up runs (made_run.py) with all else that a report shows: traces, events, text that means harm."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from made_run import config, pulse_rows, step_rows, write_ledger

from areal_like.trace import Tracer
from controller.run_folder.run_folder import RunFolder

START_S = 1000.0
GROUPS, SAMPLES = 3, 4
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x07 $x_{y}$ %{y} {{ 7*7 }}"


def report_run(
    runs_dir: Path, name: str = "made", *, num_steps: int = 30, num_workers: int = 2, has_pulses: bool = True,
    has_traces: bool = True, has_ledger: bool = True, status: str = "finished", staleness: int = 2, words: str = "",
    step_s: float = 4.0, **columns: Any,
) -> RunFolder:  # fmt: skip
    """A whole run. `words` is put wherever a run may bring text of its own; `columns` replace those of the steps."""
    folder = RunFolder.create(runs_dir, name)
    rows = [*_steps(num_steps, step_s, staleness, columns), *_evals(num_steps, step_s, words), *_events(words)]
    rows += [
        {"kind": "swap", "time_s": START_S, "worker": "rollout-0", "version": v, "stage_s": 0.01, "pause_s": 0.002}
        for v in range(num_steps + 1)
    ]
    if has_pulses:
        pulses = pulse_rows(num_steps, step_s, wait=0.2, busy=0.7, workers=num_workers, groups_per_step=GROUPS)
        said = [f"trainer waits for batch 7: 2 of 3 groups ready; rollout-0 holds 5 samples {words}"]
        for place, pulse in enumerate(pulses):
            rows.append({**pulse, "waits": said, "counts": {**pulse["counts"], "running": 5 + place % 3, "ready": 2}})
    write_metrics(folder, rows)
    write_state(folder, status, ended_s=START_S + num_steps * step_s)
    settings = config(
        num_steps=num_steps, groups_per_step=GROUPS, group_size=SAMPLES, staleness__max_staleness=staleness,
        rollout__num_workers=num_workers, trainer__optimizer__max_grad_norm=1.0,
    )  # fmt: skip
    folder.config.write_text(yaml.safe_dump({"name": folder.name, **settings, "note": words}, sort_keys=False))
    if status in ("finished", "stopped"):
        folder.summary.write_text(json.dumps(_summary(num_steps, step_s)))
    (folder.root / "trainer.json").write_text(json.dumps({"torch": "2.13.0+cpu", "device": "cpu", "words": words}))
    if has_traces:
        write_traces(folder, num_steps, step_s, num_workers)
    if has_ledger:
        write_ledger(folder.root, num_steps=num_steps, groups_per_step=GROUPS, group_size=SAMPLES)
        _name_component(folder, words or "correct")
    return folder


def write_metrics(folder: RunFolder, rows: Iterable[dict[str, Any]]) -> None:
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_state(folder: RunFolder, status: str, **more: Any) -> None:
    now = {"format": 1, "run_id": "abc", "created_s": START_S - 20, "status": status, "reason": "all done",
           "controller_pid": 2**22 + 1, "controller_started_s": START_S, "updated_s": START_S}  # fmt: skip
    folder.state.write_text(json.dumps({**now, **more}))


def _steps(num_steps: int, step_s: float, staleness: int, columns: dict[str, Any]) -> list[dict[str, Any]]:
    rows = step_rows(
        num_steps, step_s, trainer_wait_share=0.2, samples_per_s=GROUPS * SAMPLES / step_s,
        num_samples=GROUPS * SAMPLES, num_sampled_tokens=4000.0, trainer_tokens_per_s=4000 / step_s,
        response_len_p50=21.0, response_len_p99=90.0, response_len_max=99.0, publish_s=0.01, weight_max=2.0,
        weight_mean=1.0, kl_proximal_current=0.0, **columns,
    )  # fmt: skip
    for place, row in enumerate(rows):
        levels = [min(staleness, place, group) for group in range(GROUPS)]
        row |= {"staleness": levels, "staleness_mean": sum(levels) / GROUPS, "staleness_max": max(levels)}
        row["step_s"] = 0.7 * step_s
        row["rollout_tokens_per_s"] = (4200 + 300 * math.sin(place)) / step_s
    return rows


def _evals(num_steps: int, step_s: float, words: str) -> list[dict[str, Any]]:
    """Evaluations of three versions or more, each with the answers to two prompts."""
    versions = sorted({0, *range(10, num_steps + 1, 10), num_steps}) if num_steps else []
    return [
        {"kind": "eval", "time_s": START_S + v * step_s, "version": v, "num_scored": 200,
         "accuracy": 0.25 + 0.65 * v / num_steps,
         "answers": [{"row": row, "prompt": f"{row}+2= {words}", "answer": f"it is {v + row} {words}",
                      "value": None if row else v / num_steps} for row in range(2)]}
        for v in versions
    ]  # fmt: skip


def _events(words: str) -> list[dict[str, Any]]:
    return [
        {"kind": "note", "time_s": START_S + 9, "note": "worker_lost", "text": f"rollout-1 is lost (signal 9) {words}"},
        {"kind": "process", "time_s": START_S + 9, "name": "rollout-1", "event": "lost", "reason": f"signal 9 {words}"},
        {"kind": "process", "time_s": START_S + 12, "name": "rollout-1", "event": "restarted", "reason": ""},
        {"kind": "sink", "time_s": START_S + 20, "sink": "wandb", "event": "down", "error": f"refused {words}",
         "written": 10, "lost": 3},
        *({"kind": "dropped", "time_s": START_S + 15 + n, "group_id": n, "reason": "too_stale", "detail": words}
          for n in range(3)),
    ]  # fmt: skip


def _summary(num_steps: int, step_s: float) -> dict[str, Any]:
    wall_s = num_steps * step_s
    return {
        "status": "completed", "accuracy_before": 0.25, "wall_s": wall_s + 12, "prepare_s": 8.0,
        "train_wall_s": wall_s, "steps": num_steps, "samples_per_s": GROUPS * SAMPLES / step_s,
        "tokens_per_s": 4000 / step_s, "trainer_wait_share": 0.2, "rollout_idle_share": 0.25,
        "rollout_paused_share": 0.01, "groups_drawn": num_steps * GROUPS + 3, "groups_consumed": num_steps * GROUPS,
        "groups_filtered": 0, "groups_dropped": 3, "groups_in_flight": 0, "audit": "clean",
    }  # fmt: skip


def _name_component(folder: RunFolder, name: str) -> None:
    """The samples' only component gets this name, and the first sample a verdict that is no score."""
    with sqlite3.connect(folder.ledger) as db:
        for value in (0.0, 1.0):
            facts = json.dumps({"components": {name: value}, "finish_reason": "stop"}).encode()
            db.execute("UPDATE samples SET facts = ? WHERE value = ?", (facts, value))
        db.execute("UPDATE samples SET verdict_kind = 'timed_out' WHERE group_id = 0 AND sample_index = 0")
    db.close()


def write_traces(
    folder: RunFolder, num_steps: int, step_s: float, num_workers: int, *, start_s: float = START_S
) -> None:
    """What the `main` lanes of each process would hold, appended as a resumed run does."""
    names = [*(f"rollout-{n}" for n in range(num_workers)), "trainer", "reward", "controller"]
    tracers = {name: Tracer(folder.logs / f"{name}.trace.jsonl", name) for name in names}

    def slices(name: str, at: float, *parts: tuple[str, float, float], lane: str = "main") -> None:
        for activity, begin, end in parts:
            tracers[name].complete(activity, at + begin * step_s, at + end * step_s, lane)

    for step in range(num_steps):
        at = start_s + step * step_s
        for number in range(num_workers):
            name = f"rollout-{number}"
            slices(name, at, ("generate", 0.0, 0.9), lane="slot 3")
            slices(name, at, ("generate", 0.0, 0.7), ("swap", 0.7, 0.72), ("wait:score", 0.72, 0.8))
            slices(name, at, ("wait:work", 0.8, 1.0))
        slices("trainer", at, ("wait:batch", 0, 0.2), ("update", 0.85, 0.9), ("forward_backward", 0.2, 0.9),
               ("publish", 0.9, 1))  # fmt: skip
        slices("trainer", at, ("packing", 0, 0.05), lane="packing")
        slices("reward", at, ("score", 0.6, 0.75), ("wait:requests", 0.75, 1.6))
        slices("controller", at, ("ledger", 0.5, 0.55))
    for tracer in tracers.values():
        tracer.close()
