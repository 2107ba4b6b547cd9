"""What `Workers` keeps up to date, and the same computed from every worker."""

from __future__ import annotations

import pytest

from areal_like.trajectory import NO_VERSION
from controller.coordinator.worker import Workers


def looked_up(workers: Workers) -> dict[str, object]:
    """The same, the slow way."""
    present = [w for w in workers.values() if w.is_present and not w.weights.quarantine and not w.is_draining]
    usable = [w for w in present if w.weights.version >= 0]
    known = [w.speed for w in present if w.speed > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {
        "present": [w.name for w in present],
        "usable": [w.name for w in usable],
        "open": [w.name for w in usable if w.free > 0],
        "speeds": (usual, max(known, default=1.0)),
        "newest": max((w.weights.version for w in usable if w.weights.pin is None), default=NO_VERSION),
        "capacity": float(sum(w.capacity for w in present)),
        "speed_capacity": pytest.approx(sum(w.capacity * (w.speed or usual) for w in present)),
    }


def kept(workers: Workers) -> dict[str, object]:
    """What the roster says."""
    names = {key: [w.name for w in getattr(workers, key)] for key in ("present", "usable", "open")}
    return {**names, **{key: getattr(workers, key) for key in ("speeds", "newest", "capacity", "speed_capacity")}}
