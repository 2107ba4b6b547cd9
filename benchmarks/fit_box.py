"""The bounds of the numbers that the simulator fits, and which fitted numbers are at a bound.

simulator.py fits. This module imports little, because tables use it.
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
"""Relative distance to a bound that counts as reaching it: numbers are published with three digits."""


def at_bound(efficiencies: Mapping[str, float]) -> list[str]:
    """Fitted numbers at a bound. The data would place them beyond it, so they show the bound and not a fitted value."""
    return [
        name for name, ends in BOX.items() if any(math.isclose(efficiencies[name], end, rel_tol=NEAR) for end in ends)
    ]
