"""Compares the metrics of a replayed step with its row in metrics.jsonl. Pure.

Numbers are compared exactly: metrics.jsonl has the shortest text that gives the same double.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TIMES = frozenset({"step_s"})
"""Metrics that measure time."""
OF_THE_ROW = frozenset({"staleness_mean", "staleness_max"})
"""Metrics that the controller replaces in the row with its own of the same name."""
OF_EARLIER_STEPS = frozenset(
    {"gradient_cosine", "adapter_error_nats", "adapter_effect_nats", "versions_held", "versions_mb", "version_passes"}
)
"""Metrics that depend on what this start of the trainer did before."""


class MetricDifference(NamedTuple):
    """A metric whose recorded and replayed values differ; None: it is missing or not finite."""

    name: str
    recorded: Any
    replayed: Any


def compare_metrics(
    row: Mapping[str, Any], replayed: Mapping[str, Any], leave_out: Collection[str] = (), *, is_whole: bool = False
) -> tuple[int, MetricDifference | None]:
    """Return the number of metrics compared, and the first that differs.

    Args:
        row: the step's row.
        replayed: what the trainer measured in the replay, decoded from JSON.
        leave_out: metrics that are not compared.
        is_whole: whether `row` has metrics of the trainer alone, so that one that is missing in `replayed` differs. A
            row of metrics.jsonl has the controller's as well.

    Example:
        >>> compare_metrics({"step": 3, "loss": 0.25}, {"loss": 0.5, "step_s": 1.0})
        (1, MetricDifference(name='loss', recorded=0.25, replayed=0.5))
    """
    every = [*replayed, *(name for name in row if name not in replayed)] if is_whole else replayed
    names = [name for name in every if name not in TIMES | OF_THE_ROW and name not in leave_out]
    for name in names:
        if row.get(name) != replayed.get(name) or name not in replayed:
            return len(names), MetricDifference(name, row.get(name), replayed.get(name))
    return len(names), None
