"""A router over workers as a test makes them."""

from __future__ import annotations

from typing import Any

from controller.coordinator.routing import Router
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Worker

BIG: dict[str, Any] = {
    "groups_per_step": 64,
    "group_size": 4,
    "num_steps": 4,
    "max_staleness": 0,
    "max_new_tokens": 100,
}


def view(*workers: Worker, **changes: Any) -> Router:
    """A router over workers as given, all of them at version 0."""
    state = RunState(CoordinatorSettings(**{**BIG, **changes}))
    state.trainer.version = 0
    for worker in workers:
        worker.is_present, worker.capacity, worker.num_slots = True, 16, 8
        worker.weights.version = max(0, worker.weights.version)
        state.workers[worker.name] = worker
    return Router(state)
