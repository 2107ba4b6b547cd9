"""Claims about clocks."""

from __future__ import annotations

import pytest

from areal_like.clock import Clock, SystemClock, VirtualClock


def test_virtual_clock_moves_only_when_reported() -> None:
    clock = VirtualClock(start_s=5.0)
    wall_s = clock.wall_s()
    assert clock.monotonic_s() == clock.monotonic_s() == 5.0
    clock.advance(2.5)
    clock.advance_to(10.0)
    clock.advance(0.0)
    clock.advance_to(10.0)
    assert (clock.monotonic_s(), clock.wall_s() - wall_s) == (10.0, 5.0)


def test_virtual_clock_begins_at_its_epoch_wherever_its_seconds_begin() -> None:
    assert VirtualClock(start_s=5.0, epoch_s=100.0).wall_s() == 100.0


@pytest.mark.parametrize("seconds", [-1e-9, float("nan")])
def test_virtual_clock_never_goes_back(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        VirtualClock().advance(seconds)


def test_system_clock_fits_the_port() -> None:
    clock: Clock = SystemClock()
    assert clock.monotonic_s() <= clock.monotonic_s()
    assert clock.wall_s() > 1.7e9
