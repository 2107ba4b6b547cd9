"""Totals of a run, collected during the run and written to summary.json.

The text is in summary_page.py, the audit in audit.py.

After a resume, steps, staleness, accuracies, fates, lengths and shares are those of the whole run; times and rates
(OF_LAST_STRETCH) are those of the last session. Wherever they are shown, the part is stated (`lives` counts the
sessions, `trainer_restarts` the restarts of the trainer alone).

Shares are of a process's own time: trainer_wait_share of waiting and working, rollout_idle_share of idle, busy and
paused, each summed over processes. The shares of a tally are of the session. At the end they are replaced by those of
the diagnosis (report/shares.py), which leave out the start and the end of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.encryption.texts import Texts
from controller.coordinator.snapshot import BatchRecord, Counts
from controller.data.eval_layout import EvalLayout
from controller.ledger.sample_lengths import SampleLengths
from controller.ledger.sample_sources import SampleSources
from controller.telemetry.answer_signs import AnswerSigns
from controller.telemetry.eval_answers import EvalAnswers
from controller.telemetry.eval_results import metrics_of
from controller.telemetry.eval_values import EvalValues

OF_LAST_STRETCH = (
    "wall_s", "prepare_s", "train_wall_s", "samples_per_s", "tokens_per_s",
)  # fmt: skip
"""Keys that count from the last resume; all others cover the whole run."""
SINCE_RESUME = "since the last resume"


def _share(part_s: float, whole_s: float) -> float | None:
    return round(part_s / whole_s, 4) if whole_s > 0 else None


@dataclass
class Tally:
    """Running sums of one run."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    """Tokens sampled by the policy that a step has consumed."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Groups by staleness at consumption."""
    accuracy: dict[int, float] = field(default_factory=dict)
    """Mean of component `correct` (else of the value) by evaluated version."""
    eval_metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """All numbers of an evaluation, by evaluated version; see eval_results.py."""
    layout: EvalLayout | None = None
    """Of evaluations; None: one set, one answer per row."""
    solved_value: float = 1.0
    """`eval.solved_value`"""
    eval_rows: dict[int, int] = field(default_factory=dict)
    """Rows with a score, by evaluated version."""
    train_wall_s: float = 0.0
    """Seconds from the first lease to the last step."""
    counters: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Newest counters of each process, by name and incarnation."""
    is_resumed: bool = False
    """Whether an earlier session of the run has left records."""
    answers: EvalAnswers = field(default_factory=EvalAnswers)
    """Answers to the first held-out prompts."""
    values: EvalValues = field(default_factory=EvalValues)
    """Values of the answers of evaluations."""
    signs: AnswerSigns = field(default_factory=AnswerSigns)
    """Signs of reward hacking in the answers of the step in progress."""
    lengths: SampleLengths = field(default_factory=SampleLengths)
    """Lengths of drawn and of trained samples."""
    sources: SampleSources = field(default_factory=lambda: SampleSources(lambda draw: "data.train"))
    """Sources of drawn and of trained groups."""

    def add_step(self, num_samples: int, num_tokens: int, staleness: Sequence[int]) -> None:
        """Add one consumed batch."""
        self.steps += 1
        self.samples += num_samples
        self.tokens += num_tokens
        self.staleness.update(staleness)

    def add_history(self, staleness: Sequence[int]) -> None:
        """Add a batch that an earlier session of the run consumed."""
        self.steps += 1
        self.staleness.update(staleness)

    def add_evaluation(self, version: int, values: Sequence[float | None]) -> int:
        """Add a finished evaluation; return the number of answers with a score. Without any score there is no accuracy
        (not zero).
        """
        scored = [value for value in values if value is not None]
        if scored:
            found = metrics_of(values, self.layout, solved=self.solved_value)
            self.eval_metrics[version], self.accuracy[version] = found, found["accuracy"]
            self.eval_rows[version] = len(scored)
        return len(scored)

    def add_counters(self, name: str, incarnation: str, counters: Mapping[str, float]) -> None:
        """Update the counters of one process; a restarted process starts at zero and is added to its predecessor."""
        self.counters[name, incarnation] = dict(counters)

    def total(self, prefix: str, key: str) -> float:
        """Sum of one counter over all processes whose name starts with `prefix`."""
        return sum(found.get(key, 0.0) for (name, _), found in self.counters.items() if name.startswith(prefix))

    def totals(self) -> dict[str, dict[str, float]]:
        """All counters by process name, summed over incarnations."""
        sums: dict[str, Counter[str]] = {}
        for (name, _), found in self.counters.items():
            mine = sums.setdefault(name, Counter())
            for key, value in found.items():
                mine[key] += value  # type: ignore[assignment]
        return {name: dict(found) for name, found in sums.items()}

    def summary(self, counts: Mapping[str, Any], *, status: str, wall_s: float, prepare_s: float) -> dict[str, Any]:
        """The summary's values; None if a run had nothing to measure (no evaluation, no step)."""
        num_groups = sum(self.staleness.values())
        versions = sorted(self.accuracy)
        after = self.eval_metrics.get(versions[-1], {}) if versions else {}
        trainer_wait_s, trainer_busy_s = self.total("trainer", "wait_s"), self.total("trainer", "busy_s")
        busy_s, idle_s = self.total("rollout", "busy_s"), self.total("rollout", "idle_s")
        paused_s = self.total("rollout", "paused_s")
        return {
            "status": status,
            "accuracy_before": self.accuracy.get(0),
            "accuracy_after": self.accuracy[versions[-1]] if versions and versions[-1] > 0 else None,
            "accuracy_after_version": versions[-1] if versions and versions[-1] > 0 else None,
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
            **({"lengths": lengths} if (lengths := self.lengths.summary()) else {}),
            **({"sources": sources} if (sources := self.sources.summary()) else {}),
            **({"eval_metrics": {"before": self.eval_metrics.get(0), "after": after}} if len(after) > 1 else {}),
            "accuracy_by_version": {str(version): self.accuracy[version] for version in versions},
            **({"answers": answers} if (answers := self.answers.before_and_after()) else {}),
        }


def fates(counts: Counts, batches: Sequence[BatchRecord], *, group_size: int, version: int) -> dict[str, Any]:
    """Groups and samples by fate, with the policy at `version`.

    A batch that was sent but not trained (because of a stop) is in flight. A filtered or dropped group counts with all
    its samples; of a consumed one the kept samples count as consumed, and the others as dropped.
    """
    done = [batch for batch in batches if batch.step <= version]
    num_groups = sum(len(batch.groups) for batch in done)
    num_samples = sum(len(group.sample_indices) for batch in done for group in batch.groups)
    num_dropped = sum(counts.dropped.values())
    return {
        "groups_drawn": counts.drawn,
        "groups_consumed": num_groups,
        "groups_filtered": counts.filtered,
        "groups_dropped": num_dropped,
        "dropped_by_reason": dict(counts.dropped),
        "groups_in_flight": counts.in_flight + counts.consumed - num_groups,
        "samples_consumed": num_samples,
        "samples_filtered": counts.filtered * group_size,
        "samples_dropped": num_dropped * group_size + num_groups * group_size - num_samples,
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Replace summary.json atomically."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(Texts.to_write(path).sealed_row(summary), indent=1))
    fresh.replace(path)
