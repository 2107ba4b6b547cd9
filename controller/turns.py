"""Versions between their announcement and their use: whose turn it is to swap, and who is late.

Owns: staged versions, turns (`swap: rolling`), the deadline of a load. Refuses: announcing, and what loading or failing
means (workers.py). A turn is passed on when its worker has swapped, failed, died or missed the deadline.
"""

from __future__ import annotations

import math

from areal_like.trajectory import NO_VERSION
from controller import protocol as p
from controller.state import RunState
from controller.workers import quarantine


def version_staged(state: RunState, event: p.WorkerVersionStaged) -> None:
    """The worker waits for its turn from now on; that it comes is not its business."""
    worker = state.workers.get(event.worker)
    if worker is None or event.lineage not in state.lineages or event.version != worker.announced:
        state.note("ignored", f"{event.worker} staged version {event.version} of lineage {event.lineage}")
        return
    worker.staged, worker.has_turn, worker.load_due_s = event.version, False, math.inf
    state.progress += 1


def judge_late(state: RunState) -> None:
    """A worker that misses the deadline is quarantined and the others go on; when it has loaded after all it is back.

    It may be busy with it still, so nothing is taken from it and nothing is said to it.
    """
    for worker in state.workers.values():
        if worker.is_present and state.now_s > worker.load_due_s:
            doing = "swap it in" if worker.has_turn else "get it"
            worker.end_load()
            quarantine(state, worker, f"it did not {doing} within {state.settings.load_deadline_s:g} s")


def give(state: RunState) -> None:
    """The next worker swaps when the one before has, or is given up. Who is furthest behind comes first."""
    waiting = []
    for worker in state.workers.values():
        if worker.is_present and worker.has_turn:
            return
        if worker.is_present and worker.staged == worker.announced != NO_VERSION and not worker.has_turn:
            waiting.append(worker)
    if waiting:
        worker = min(waiting, key=lambda one: (one.version, one.name))
        worker.has_turn, worker.load_due_s = True, state.now_s + state.settings.load_deadline_s
        state.emit(p.SendSwap(worker=worker.name, version=worker.staged, lineage=worker.announced_lineage))
