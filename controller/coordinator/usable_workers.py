"""Pure functions that determine whether rollout workers can still do work.

The consequences are in termination.py and colocation.py.
"""

from __future__ import annotations

import math

from controller.coordinator import rewriting
from controller.coordinator.run_state import RunState
from controller.coordinator.worker import Worker


def is_stuck(state: RunState, worker: Worker) -> bool:
    """Return whether this worker can do no more work without a new version."""
    if not worker.is_present:
        return worker.is_gone
    if rewriting.is_under_way(state.trainer, state.trainer.version) or worker.weights.load_due_s < math.inf:
        return False
    weights = worker.weights
    has_tries = weights.load_attempts < state.settings.max_load_attempts or state.now_s < weights.retry_at_s
    return bool(weights.quarantine) and not has_tries and not worker.outstanding


def has_no_usable_workers(state: RunState) -> bool:
    """Return whether every expected worker has joined or was lost before, and none can do more work."""
    return num_expected(state) <= 0 and all(is_stuck(state, worker) for worker in state.workers.values())


def num_expected(state: RunState) -> int:
    """Workers that the run started and that have neither joined nor been lost yet. External ones are not expected."""
    return state.settings.num_workers - sum(not worker.is_external for worker in state.workers.values())
