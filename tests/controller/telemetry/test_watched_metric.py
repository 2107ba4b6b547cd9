"""When a metric has stopped getting better."""

from __future__ import annotations

import pytest

from controller.config.early_stop_settings import EarlyStopSettings
from controller.telemetry.watched_metric import EarlyStop, is_better


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "stops_at"),
    [
        ("max", 0.0, [0.1, 0.2, 0.2, 0.2], 3),
        ("max", 0.0, [0.1, 0.1, 0.2, 0.1, 0.3], None),
        ("max", 0.05, [0.1, 0.14, 0.16, 0.2, 0.2], 4),
        ("max", 0.05, [0.1, 0.12, 0.14, 0.3], 2),
        ("min", 0.0, [3.0, 2.0, 2.5, 2.1], 3),
        ("max", 0.0, [0.2, None, 0.1, None, 0.1], 4),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_a_better_value(
    mode: str, min_delta: float, values: list[float | None], stops_at: int | None
) -> None:
    rule = EarlyStop(EarlyStopSettings(mode=mode, min_delta=min_delta, patience=2))  # type: ignore[arg-type]
    reasons = [rule.take(version, value) for version, value in enumerate(values)]
    assert next((place for place, reason in enumerate(reasons) if reason), None) == stops_at


def test_the_reason_names_metric_value_version_and_patience() -> None:
    rule = EarlyStop(EarlyStopSettings(patience=1, min_delta=0.01))
    assert rule.take(20, 0.5) == ""
    words = "early stop: accuracy was not better than 0.5 (version 20) by more than 0.01 in 1 evaluation"
    assert rule.take(40, 0.505) == words


def test_a_version_that_is_evaluated_again_counts_once() -> None:
    rule = EarlyStop(EarlyStopSettings(patience=2))
    assert [rule.take(version, 0.5) for version in (20, 40, 40, 20)] == ["", "", "", ""]
    assert rule.take(60, 0.5)


def test_better_is_strict() -> None:
    assert not is_better(1.0, 1.0, "max")
    assert is_better(0.9, 1.0, "min")
    assert not is_better(0.9, 1.0, "min", 0.2)
