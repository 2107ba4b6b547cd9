"""Mean number of cores that each process of a run used, computed from the processor time in the pulses.

Thresholds are in waits.py, drawing in flow_charts.py.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from areal_like.errors import UserError
from controller.config.launchers import LOCAL, find_launcher
from controller.report.data import Row, RunData, number

Between = tuple[int, float, dict[str, float]]
"""Index of the later pulse, seconds since the earlier one, processor seconds of each process known in both."""


def between(pulses: Sequence[Row], key: str = "cpu_s") -> Iterator[Between]:
    """Each pair of consecutive pulses, without the time between two sessions of a run. For a process that was restarted
    in between, only the time of its new incarnation counts. key: `cpu_s`, or `queue_s` for waits for a core.
    """
    for place, (earlier, later) in enumerate(itertools.pairwise(pulses), start=1):
        if number(later, "wall_s", 0.0) < number(earlier, "wall_s", 0.0):
            continue
        elapsed_s = number(later, "time_s") - number(earlier, "time_s")
        before, after = _spent(earlier, key), _spent(later, key)
        if elapsed_s > 0:
            yield (
                place,
                elapsed_s,
                {
                    name: max(0.0, after[name] - (before[name] if _life(earlier, name) == _life(later, name) else 0.0))
                    for name in after
                    if name in before
                },
            )


def used(pulses: Sequence[Row]) -> dict[str, float]:
    """Mean number of cores of each process; empty if the pulses do not contain it."""
    spent: defaultdict[str, float] = defaultdict(float)
    total_s = 0.0
    for _, elapsed_s, grown in between(pulses):
        if grown:
            total_s += elapsed_s
            for name, seconds in grown.items():
                spent[name] += seconds
    return {name: seconds / total_s for name, seconds in spent.items()}


def available(data: RunData) -> float:
    """Cores of the machine of all processes; NaN if not known, or if they are on several machines."""
    if not data.pulses or not _is_one_machine(str(data.setting("launch.kind", LOCAL.name))):
        return math.nan
    reported = data.pulses[-1].get("processor")
    return number(reported, "cores") if isinstance(reported, Mapping) else math.nan


def _is_one_machine(kind: str) -> bool:
    """Return whether the launcher uses one machine; None if the launcher is unknown here."""
    try:
        return find_launcher(kind).is_one_machine
    except UserError:
        return False


def _life(pulse: Row, name: str) -> object:
    """Identifies an incarnation of a process; None for the controller, which has one per session."""
    return pulse["processes"].get(name, {}).get("pid")


def _spent(pulse: Row, key: str) -> dict[str, float]:
    reported = pulse.get("processor")
    spent = reported.get(key) if isinstance(reported, Mapping) else None
    if not isinstance(spent, Mapping):
        return {}
    return {str(name): value for name in spent if math.isfinite(value := number(spent, name))}
