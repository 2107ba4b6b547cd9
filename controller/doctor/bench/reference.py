"""Results of the reference machine, on which figures of benchmarks/results/ were measured.

To update the table, run `areal-like doctor --bench --json` on an idle machine, and use median, low and high of each
finding of the topic Benchmark.
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


DATE = "2026-11-21"
MACHINE: Mapping[str, object] = {
    "cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "python": "3.11.7", "torch": "2.13.0+cpu",
}  # fmt: skip
FIGURES: Mapping[str, Figure] = {
    "product_1": Figure(210e9, 185e9, 211e9),
    "product_all": Figure(412e9, 397e9, 416e9),
    "copy": Figure(6.80e9, 6.38e9, 6.84e9),
    "messages": Figure(799e3, 722e3, 883e3),
    "stream": Figure(4.16e9, 3.72e9, 6.56e9),
    "write": Figure(306e6, 108e6, 317e6),
    "start": Figure(0.00836, 0.00828, 0.00872),
}


def text() -> str:
    """Machine and date as text."""
    cores = f"{MACHINE['cores']} cores of {MACHINE['cpu']}"
    return f"{cores}, Python {MACHINE['python']}, torch {MACHINE['torch']}, {DATE}"
