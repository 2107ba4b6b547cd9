"""The end of a run is decided once."""

from __future__ import annotations

from areal_like.errors import OperationError
from controller.runtime.outcome import Outcome, RunEnd


def test_first_outcome_counts_and_wakes_the_server():
    end = RunEnd()
    assert not end.over.is_set()
    first = Outcome("failed", "the trainer died", OperationError("status 1"))
    end.decide(first)
    assert end.over.is_set()
    end.decide(Outcome("completed", "all steps done"))
    assert end.outcome is first
