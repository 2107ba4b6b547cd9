"""What a run did, in numbers: collected while it runs, written to summary.json and printed at its end.

Owns: the sums and the keys of the summary. Refuses: display while running, judging laws (audit.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def _share(part_s: float, whole_s: float) -> float | None:
    return round(part_s / whole_s, 4) if whole_s > 0 else None


@dataclass
class Tally:
    """Running sums of one run (or of one stretch of it, after a resume)."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    """Tokens the policy sampled that a step has consumed."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Groups by staleness at consumption."""
    accuracy: dict[int, float] = field(default_factory=dict)
    """Mean of component `correct` (else of the value) by evaluated version."""
    eval_rows: dict[int, int] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    train_wall_s: float = 0.0
    """From the first lease to the last step."""
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Sums of each process's own counters; those of earlier incarnations are kept in `retired`."""
    retired: dict[str, Counter[str]] = field(default_factory=dict)

    def add_step(self, metrics: Mapping[str, float], num_samples: int, num_tokens: int, staleness: list[int]) -> None:
        """One consumed batch."""
        self.steps += 1
        self.samples += num_samples
        self.tokens += num_tokens
        self.staleness.update(staleness)
        self.last_metrics = dict(metrics)

    def add_history(self, staleness: list[int]) -> None:
        """A batch that an earlier stretch of the run consumed."""
        self.steps += 1
        self.staleness.update(staleness)

    def add_counters(self, name: str, counters: Mapping[str, float]) -> None:
        """The latest monotonic counters of a process; a counter that went back means a new incarnation."""
        old = self.counters.get(name, {})
        if any(counters.get(key, 0.0) < value for key, value in old.items()):
            self.retired.setdefault(name, Counter()).update(old)
        self.counters[name] = dict(counters)

    def total(self, prefix: str, key: str) -> float:
        """Sum of one counter over all processes whose name starts with `prefix`."""
        names = [name for name in {*self.counters, *self.retired} if name.startswith(prefix)]
        return sum(
            self.counters.get(name, {}).get(key, 0.0) + self.retired.get(name, Counter()).get(key, 0.0)
            for name in names
        )

    def summary(self, counts: Mapping[str, Any], *, status: str, wall_s: float, prepare_s: float) -> dict[str, Any]:
        """The summary's keys; None where a run had nothing to measure (no evaluation, no step)."""
        num_groups = sum(self.staleness.values())
        versions = sorted(self.accuracy)
        trainer_wait_s, trainer_busy_s = self.total("trainer", "wait_s"), self.total("trainer", "busy_s")
        busy_s, idle_s = self.total("rollout", "busy_s"), self.total("rollout", "idle_s")
        paused_s = self.total("rollout", "paused_s")
        return {
            "status": status,
            "accuracy_before": self.accuracy.get(0),
            "accuracy_after": self.accuracy[versions[-1]] if versions and versions[-1] > 0 else None,
            "eval_prompts": self.eval_rows[versions[-1]] if versions else 0,
            "wall_s": round(wall_s, 2),
            "prepare_s": round(prepare_s, 2),
            "train_wall_s": round(self.train_wall_s, 2),
            "steps": self.steps,
            "samples_per_s": round(self.samples / self.train_wall_s, 2) if self.train_wall_s else None,
            "tokens_per_s": round(self.tokens / self.train_wall_s, 1) if self.train_wall_s else None,
            "trainer_wait_share": _share(trainer_wait_s, trainer_wait_s + trainer_busy_s),
            "rollout_idle_share": _share(idle_s, busy_s + idle_s + paused_s),
            "rollout_paused_share": _share(paused_s, busy_s + idle_s + paused_s),
            "staleness_mean": (
                round(sum(k * n for k, n in self.staleness.items()) / num_groups, 3) if num_groups else None
            ),
            "staleness_max": max(self.staleness, default=None),
            "staleness_histogram": {str(k): n for k, n in sorted(self.staleness.items())},
            **counts,
            "accuracy_by_version": {str(version): self.accuracy[version] for version in versions},
        }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Replace summary.json atomically."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(summary, indent=1))
    fresh.replace(path)


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "  ".join(f"{key}: {_words(item)}" for key, item in value.items()) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_summary(summary: Mapping[str, Any], folder: Path, console: Console) -> None:
    """The summary as a table of two columns, then where things lie."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in summary.items():
        table.add_row(key, _words(value))
    console.print(table)
    console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)
