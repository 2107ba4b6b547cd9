"""Early stopping: the best value of an evaluation metric in a run, and when it has stopped improving.

Checkpoints are kept and runs are ended in runtime/evaluation_watch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.metric_settings import Direction
from controller.config.early_stop_settings import EarlyStopSettings

EARLY_STOP = "early stop"
"""Start of the reason for a run's end."""


def is_better(value: float, than: float, mode: Direction, by: float = 0.0) -> bool:
    """Whether `value` is better by more than `by`."""
    return value - than > by if mode == "max" else than - value > by


@dataclass
class EarlyStop:
    """Counts evaluations without a better value. Values must come in order of versions; an evaluation without the
    metric is not counted."""

    settings: EarlyStopSettings
    best: float | None = None
    best_version: int = -1
    newest_version: int = -1
    num_without: int = 0
    """Evaluations since the best one."""

    def take(self, version: int, value: float | None) -> str:
        """Take one evaluation. Returns why the run should end as a sentence, or an empty text."""
        rule = self.settings
        if value is None or version <= self.newest_version:  # a resumed run evaluates some versions again
            return ""
        self.newest_version = version
        if self.best is None or is_better(value, self.best, rule.mode, rule.min_delta):
            self.best, self.best_version, self.num_without = value, version, 0
            return ""
        self.num_without += 1
        if self.num_without < rule.patience:
            return ""
        delta = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        return (
            f"{EARLY_STOP}: {rule.metric} was not better than {self.best:.4g} (version {self.best_version}){delta} in "
            f"{self.num_without} evaluation{'s' if self.num_without > 1 else ''}"
        )
