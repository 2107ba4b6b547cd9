"""Finding about length bias: whether trained answers are shorter than generated ones, because drops select by length.

The lengths are counted in sample_lengths.py.
"""

from __future__ import annotations

from typing import Any

from controller.report.data import RunData, number
from controller.report.finding import Finding, Rated, Weight, figure, percent, sentences
from controller.report.upkeep import drop_advice

SHIFT_NOTABLE = 0.02
"""Minimum shift; smaller shifts occur within a few steps of training."""
SHIFT_BAD = 0.3
Z_NOTABLE = 4.0
"""Minimum standard errors; four are not due to chance, even with repeated checks."""


def find(data: RunData) -> list[Rated]:
    """A warning if trained answers differ in length from the drawn ones by more than noise."""
    row = data.steps[-1] if data.steps else {}
    shift, z = number(row, "length_shift", 0.0), number(row, "length_shift_z", 0.0)
    if abs(z) < Z_NOTABLE or abs(shift) < SHIFT_NOTABLE:
        return []
    lost = _lost(data)
    cause = max(lost, key=lambda name: number(lost[name], "samples", 0.0), default="")
    finding = Finding(
        "length_shift",
        "bad" if abs(shift) >= SHIFT_BAD else "warning",
        "Answers used for training are "
        f"{percent(abs(shift))} {'shorter' if shift < 0 else 'longer'} than generated ones: "
        f"{figure(number(row, 'trained_len_mean'))} vs. {figure(number(row, 'drawn_len_mean'))} tokens on average, "
        f"{figure(number(row, 'trained_len_p99'))} vs. {figure(number(row, 'drawn_len_p99'))} at the 99th percentile",
        sentences(
            f"The lengths of lost groups differ from those of groups used for training by {abs(z):.0f} standard errors",
            f"Lost: {', '.join(_words(name, lost[name]) for name in lost)}" if lost else "",
            "The policy learns from the remaining answers, so its answers drift towards their length",
        ),
        drop_advice(data, cause, otherwise="set staleness.on_stale: wait, and increase staleness.group_timeout_s"),
    )
    return [Rated(Weight.SIGNAL, finding, abs(shift))]


def _lost(data: RunData) -> dict[str, Any]:
    """Lost samples by cause, from the summary, which is only written at the end of a run."""
    lengths = (data.summary or {}).get("lengths")
    lost = lengths.get("lost") if isinstance(lengths, dict) else None
    return (
        {str(name): found for name, found in lost.items() if isinstance(found, dict)} if isinstance(lost, dict) else {}
    )


def _words(name: str, found: dict[str, Any]) -> str:
    cut = ", some unfinished" if number(found, "unfinished", 0.0) else ""
    num, mean = figure(number(found, "samples")), figure(number(found, "mean"))
    return f"{num} samples {name.replace('_', ' ')} (mean {mean}{cut})"
