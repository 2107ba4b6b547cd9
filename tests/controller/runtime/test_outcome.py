"""The end of a run is decided once."""

from __future__ import annotations

import errno

import pytest

from areal_like.errors import OperationError
from controller.runtime.outcome import Outcome, RunEnd, StoppedAtOnce, as_operation


def test_first_outcome_counts_and_wakes_the_server():
    end = RunEnd()
    assert not end.over.is_set()
    first = Outcome("failed", "the trainer died", OperationError("status 1"))
    end.decide(first)
    assert end.over.is_set()
    end.decide(Outcome("completed", "all steps done"))
    assert end.outcome is first


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_said_with_the_file_and_the_way_to_go_on(number: int) -> None:
    outcome = Outcome.of(OSError(number, "No space left on device", "/runs/x/ledger.sqlite"))
    assert outcome.status == "failed"
    assert outcome.reason == (
        "/runs/x/ledger.sqlite: No space left on device -> free some disk space (areal-like doctor shows the free "
        "space), then run areal-like resume"
    )
    assert isinstance(outcome.error, OperationError)
    assert str(outcome.error) == outcome.reason


def test_other_refusals_of_the_system_are_words_and_errors_of_ours_stay_as_they_are() -> None:
    assert str(as_operation(OSError(errno.EMFILE, "Too many open files"))) == "Too many open files"
    assert str(as_operation(OSError("odd"))) == "odd"
    ours = OperationError("status 1")
    assert as_operation(ours) is ours
    assert Outcome.of(ours) == Outcome("failed", "status 1", ours)


def test_run_has_no_end_before_it_is_decided() -> None:
    end = RunEnd()
    assert (end.outcome, end.is_hurried, end.death) == (None, False, None)
    assert str(StoppedAtOnce()) == "stopped at once; continue with areal-like resume"
