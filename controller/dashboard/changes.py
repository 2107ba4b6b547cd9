"""Computes the update for a page that shows older content.

The content is made in run_view.py; updates are applied by static/run.js. A part that changed is sent completely; of a
chart only the ends of its curves, because points before the last bin do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]


def changes(old: Content, new: Content) -> dict[str, Any]:
    """Parts that differ. `charts` contains only the changed charts, as returned by `chart_change`; None: the part was
    removed.
    """
    found = {key: value for key, value in new.items() if key != "charts" and old.get(key) != value}
    before, now = old.get("charts", {}), new.get("charts", {})
    charts: dict[str, Any] = {key: None for key in before if key not in now}
    for key, chart in now.items():
        if chart != before.get(key):
            charts[key] = chart_change(before.get(key), chart)
    return {**found, **({"charts": charts} if charts else {})}


def chart_change(old: Content | None, new: Content) -> dict[str, Any]:
    """`{"ends": [[index of the first new point, xs, ys], ...]}` by series, or `{"whole": chart}`."""
    if old is None or _frame(old) != _frame(new):
        return {"whole": new}
    ends = []
    for before, now in zip(old["series"], new["series"], strict=True):
        same = min(_num_same(before["xs"], now["xs"]), _num_same(before["ys"], now["ys"]))
        ends.append([same, now["xs"][same:], now["ys"][same:]])
    num_sent, num_points = sum(len(xs) for _, xs, _ in ends), sum(len(one["xs"]) for one in new["series"])
    return {"ends": ends} if 2 * num_sent < num_points else {"whole": new}


def _frame(chart: Content) -> Any:
    """The chart without its points."""
    series = [{key: value for key, value in one.items() if key not in ("xs", "ys")} for one in chart["series"]]
    return {**chart, "series": series}


def _num_same(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Length of the common beginning."""
    for place, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            return place
    return min(len(old), len(new))
