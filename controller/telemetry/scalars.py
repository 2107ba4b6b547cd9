"""Converts rows of metrics.jsonl to named numbers over an axis, for sinks that draw curves.

Prometheus's own names are in prometheus_sink.py.

    train/<metric>              of a step row, over `step`
    eval/accuracy ...           of an evaluation, over `version`
    train/callback/<name>/...   what a callback returned for a step; eval/callback/<name>/...: for an evaluation
    run/<count>                 of a pulse: groups by fate, over `wall_s` (seconds since the first lease)
    process/<name>/<counter>    of a pulse: counters, cumulative since the process started, and rss_mb
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AXES: Mapping[str, tuple[str, str]] = {
    "step": ("step", "train/"),
    "eval": ("version", "eval/"),
    "pulse": ("wall_s", ""),
    "callback_step": ("step", "train/"),
    "callback_eval": ("version", "eval/"),
}
"""Axis and prefix by kind of row."""
AXIS_OF_PREFIX: Mapping[str, str] = {"train": "step", "eval": "version", "run": "wall_s", "process": "wall_s"}
_NOT_DRAWN = frozenset({"time_s", "is_replay"})


@dataclass(frozen=True)
class Scalars:
    """Numbers measured at one point of an axis."""

    axis: str
    at: float
    time_s: float
    """Wall-clock time."""
    values: Mapping[str, float]


def scalars(record: Mapping[str, Any]) -> Scalars | None:
    """The numbers of a row that can be drawn; None if there are none. Values that are not finite are left out."""
    found = AXES.get(record["kind"])
    if found is None:
        return None
    axis, prefix = found
    numbers = _of_pulse(record) if record["kind"] == "pulse" else {prefix + key: value for key, value in record.items()}
    values = {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value) and name.removeprefix(prefix) not in _NOT_DRAWN
    }
    values.pop(prefix + axis, None)
    return Scalars(axis, float(record[axis]), float(record["time_s"]), values)


def _of_pulse(record: Mapping[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {f"run/{name}": value for name, value in record["counts"].items()}
    numbers["run/version"] = record["version"]
    for name, process in record["processes"].items():
        numbers[f"process/{name}/rss_mb"] = process["rss_mb"]
        numbers |= {f"process/{name}/{key}": value for key, value in process["counters"].items()}
    return numbers
