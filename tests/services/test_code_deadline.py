"""The time of one program: its own, over all its runs, and a bound on the wall far beyond."""

from __future__ import annotations

import math

import pytest

from services.reward.sandbox import deadline as module
from services.reward.sandbox.deadline import WALL_FACTOR, WALL_ROOM_S, Deadline


def test_no_test_begins_once_the_own_time_is_spent_however_late_it_is_on_the_wall() -> None:
    deadline = Deadline(5.0)
    deadline.until_s = 0.0  # the wall's bound is long past
    deadline.spent_s = 5.0
    assert (deadline.is_over, deadline.left_s(), deadline.left_s(1.0)) == (False, 0.0, 1.0)
    deadline.spent_s = 5.01
    assert deadline.is_over


def test_wall_clock_starts_once_and_only_when_the_program_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    deadline = Deadline(5.0)
    assert deadline.until_s == math.inf, "a sandbox that is slow to come up costs no program its time"
    now_s = 200.0
    deadline.start()
    now_s = 205.0
    deadline.start()
    assert deadline.until_s == 200.0 + WALL_FACTOR * 5.0 + WALL_ROOM_S == 200.0 + deadline.wall_s
