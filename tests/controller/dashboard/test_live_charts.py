"""What the captions of live charts say about merged steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from controller.dashboard.live_charts import _said, staleness
from controller.report.charts import Axis, Chart


def test_staleness_is_drawn_from_zero() -> None:
    steps = [{"step": 1, "staleness_max": 2.0, "staleness_mean": 1.0}]
    data = SimpleNamespace(steps=steps, setting=lambda key: 2)
    drawn = staleness(data)  # type: ignore[arg-type]
    assert drawn.y.bottom == 0.0
    assert [line.name for line in drawn.series] == ["highest", "mean", "bound"]


def chart(key: str, label: str) -> Chart:
    return Chart(key, "Title", Axis(label, ""), Axis("y", ""), caption="Of each step.")


@pytest.mark.parametrize(
    ("key", "label", "per_bin", "is_said"),
    [
        ("chart-loss", "step", 4, True),
        ("chart-loss", "step", 1, False),
        ("chart-memory", "time", 4, False),
        ("chart-learning", "step", 4, False),  # has a point for every step
    ],
)
def test_a_caption_says_how_many_steps_a_point_stands_for(key: str, label: str, per_bin: int, is_said: bool) -> None:
    caption = _said(chart(key, label), per_bin).caption
    assert caption == "Of each step." + " Each point stands for 4 steps." * is_said
