"""The box in which the simulator's fit looks for its numbers, and which of them lie on its edge.

Owns: the bounds, `at_bound`. Refuses: fitting (simulator.py). Light, so that a table can ask it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BOX: Mapping[str, tuple[float, float]] = {
    "decode_floor_s": (5e-4, 5e-2),
    "bandwidth": (0.05, 1.0),
    "step_overhead_s": (1.0, 300.0),
}
"""Lowest and highest value of each fitted number."""
NEAR = 0.01
"""Of a bound: numbers are published with three digits."""


def at_bound(efficiencies: Mapping[str, float]) -> list[str]:
    """Fitted numbers on the edge of the box: the rows would have them beyond it, so they are limits and no findings."""
    return [
        name for name, ends in BOX.items() if any(math.isclose(efficiencies[name], end, rel_tol=NEAR) for end in ends)
    ]
