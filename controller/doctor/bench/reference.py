"""What the reference machine does: the one on which the figures of benchmarks/results/engine.json were measured.

Owns: the table, with its date and machine. Refuses: measuring. To make it anew, on an idle machine:
`areal-like doctor --bench --json`, and take median, low and high of each finding of the topic Benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest of five repeats, in the unit of the measure."""

    median: float
    low: float
    high: float


DATE = "not measured yet"
MACHINE: Mapping[str, object] = {
    "cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "python": "3.11.7", "torch": "2.13.0+cpu",
}  # fmt: skip
FIGURES: Mapping[str, Figure] = {}


def text() -> str:
    """The machine and the day in words."""
    cores = f"{MACHINE['cores']} cores of {MACHINE['cpu']}"
    return f"{cores}, Python {MACHINE['python']}, torch {MACHINE['torch']}, {DATE}"
