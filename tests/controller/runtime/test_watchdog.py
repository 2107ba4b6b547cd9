"""Claims about the watchdog."""

from __future__ import annotations

import pytest

from areal_like.errors import DeadlineExceeded
from controller.runtime.watchdog import Watchdog


def watchdog() -> Watchdog:
    return Watchdog(stall_after_s=10.0, stop_grace_s=5.0, now_s=0.0)


def test_progress_keeps_it_quiet_indefinitely():
    dog = watchdog()
    assert [dog.look(now_s, now_s, []) for now_s in range(0, 100, 9)] == [""] * 12


def test_stall_is_warned_of_once_and_then_ends_with_words():
    dog = watchdog()
    assert dog.look(0.0, 1, []) == ""
    assert dog.look(5.0, 1, ["a"]) == ""
    assert dog.look(6.0, 1, ["a waits for b"]) == "no progress for 6 s: a waits for b"
    assert dog.look(7.0, 1, ["a waits for b"]) == ""
    with pytest.raises(DeadlineExceeded, match="a waits for b"):
        dog.look(10.5, 1, ["a waits for b"])


def test_recovered_stall_is_warned_of_again_the_next_time():
    dog = watchdog()
    dog.look(0.0, 1, [])
    assert dog.look(6.0, 1, [])
    assert dog.look(7.0, 2, []) == ""
    assert dog.look(13.0, 2, [])


def test_stop_is_due_even_while_there_is_progress_and_not_postponed_by_asking_again():
    dog = watchdog()
    dog.stop_requested(1.0)
    dog.stop_requested(5.0)
    assert dog.look(5.9, "x", []) == ""
    with pytest.raises(DeadlineExceeded, match="the current step and its checkpoint"):
        dog.look(6.1, "y", [])


def test_each_limit_is_over_when_it_has_passed_and_not_before():
    dog = watchdog()
    assert dog.look(10.0, None, ["a"]) == "no progress for 10 s: a", (
        "a process that never moved has stalled from the start"
    )
    with pytest.raises(DeadlineExceeded, match="any progress"):
        dog.look(10.125, None, ["a"])
    dog = watchdog()
    dog.stop_requested(1.0)
    assert dog.look(6.0, "x", []) == ""
    with pytest.raises(DeadlineExceeded, match="no reason reported"):
        dog.look(6.125, "y", [])
