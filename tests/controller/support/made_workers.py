"""Workers in a given state, for tests of single decisions."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from controller.coordinator.worker import Worker
from controller.coordinator.worker_version import VersionState, WorkerVersion

_NAMES = {one.name for one in fields(WorkerVersion)}


def made_worker(name: str, **facts: Any) -> Worker:
    """Make a worker of which these facts are known, of itself or of its version; the rest is as at the start."""
    weights = made_weights(**{key: facts.pop(key) for key in list(facts) if key in _NAMES})
    return Worker(name, weights=weights, **facts)


def made_weights(**facts: Any) -> WorkerVersion:
    """Make what is known of a worker's version. A deadline means that it loads, a quarantine that it has failed."""
    is_loading = facts.get("load_due_s", math.inf) < math.inf
    states = {
        (False, False): VersionState.IDLE, (True, False): VersionState.LOADING,
        (False, True): VersionState.QUARANTINED, (True, True): VersionState.RETRYING,
    }  # fmt: skip
    return WorkerVersion(**{"state": states[is_loading, bool(facts.get("quarantine"))], **facts})
