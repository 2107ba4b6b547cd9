"""Claims about the main lane of a process."""

from __future__ import annotations

import random

import pytest

from areal_like.state_lane import SHORTEST_S, StateLane


class FakeTracer:
    """Keeps slices; its clock is moved by hand."""

    def __init__(self) -> None:
        self.s, self.slices = 100.0, []

    def now_s(self) -> float:
        return self.s

    def complete(self, name, start_s, end_s, lane):
        self.slices.append((name, round(start_s - 100.0, 6), round(end_s - 100.0, 6)))


@pytest.fixture
def tracer():
    return FakeTracer()


def play(tracer, lane, *moves):
    """moves: (seconds from the start, state)."""
    for at_s, name in moves:
        tracer.s = 100.0 + at_s
        lane.enter(name)


def test_states_follow_each_other_without_gap(tracer):
    lane = StateLane(tracer, "load")
    play(tracer, lane, (1.0, "generate"), (3.0, "wait:work"), (3.5, "generate"))
    tracer.s = 105.0
    lane.close()
    assert tracer.slices == [("load", 0, 1), ("generate", 1, 3), ("wait:work", 3, 3.5), ("generate", 3.5, 5)]


def test_a_state_that_is_entered_again_goes_on_in_one_slice(tracer):
    lane = StateLane(tracer, "load")
    play(tracer, lane, (1.0, "load"), (2.0, "generate"), (3.0, "generate"))
    tracer.s = 104.0
    lane.close()
    assert tracer.slices == [("load", 0, 2), ("generate", 2, 4)]


def test_blink_belongs_to_the_state_it_interrupts(tracer):
    lane = StateLane(tracer, "generate")
    play(tracer, lane, (1.0, "wait:score"), (1.001, "generate"), (2.0, "wait:work"))
    tracer.s = 103.0
    lane.close()
    assert tracer.slices == [("generate", 0, 2), ("wait:work", 2, 3)]


def test_two_states_that_alternate_faster_than_can_be_drawn_still_leave_the_one_before(tracer):
    lane = StateLane(tracer, "generate")
    for k in range(100):
        play(tracer, lane, (1.0 + k * 0.01, ("wait:score", "wait:work")[k % 2]))
    tracer.s = 102.5
    lane.close()
    assert tracer.slices[0] == ("generate", 0, 1)
    assert {name for name, *_ in tracer.slices[1:]} <= {"wait:score", "wait:work"}


def test_swap_is_drawn_however_short_and_cuts_what_it_interrupts(tracer):
    lane = StateLane(tracer, "generate", kept=("swap",))
    tracer.s = 102.0
    lane.between("swap", 101.999, 102.0)
    assert lane.state == "generate"
    tracer.s = 104.0
    lane.close()
    assert tracer.slices == [("generate", 0, 1.999), ("swap", 1.999, 2.0), ("generate", 2.0, 4)]


def test_swap_reported_late_never_overlaps_what_came_since(tracer):
    lane = StateLane(tracer, "generate", kept=("swap",))
    play(tracer, lane, (1.0, "wait:work"), (3.0, "generate"))
    lane.between("swap", 102.0, 103.5)
    tracer.s = 105.0
    lane.close()
    for (_, _, end_s), (_, start_s, _) in zip(tracer.slices, tracer.slices[1:], strict=False):
        assert end_s <= start_s


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_slices_cover_the_time_once_and_are_few(tracer, seed):
    draw = random.Random(seed)
    lane = StateLane(tracer, "a", kept=("swap",))
    num_swaps = 0
    for _ in range(20_000):
        tracer.s += draw.choice([0.0, 1e-6, 1e-3, 0.015, 0.05]) * draw.random() * 2
        if draw.random() < 0.002:
            num_swaps += 1
            lane.between("swap", tracer.s - draw.random() * 0.2, tracer.s)
        else:
            lane.enter(draw.choice("abc"))
    lane.close()
    assert tracer.slices[0][1] == 0.0
    assert tracer.slices[-1][2] == pytest.approx(tracer.s - 100.0, abs=1e-5)
    for (_, _, end_s), (_, start_s, _) in zip(tracer.slices, tracer.slices[1:], strict=False):
        assert end_s == pytest.approx(start_s, abs=2e-6)
    assert len(tracer.slices) <= (tracer.s - 100.0) / SHORTEST_S + 2 * num_swaps + 2


def test_lane_of_a_day_has_a_bounded_number_of_slices(tracer):
    lane, names = StateLane(tracer, "a"), "ab"
    for k in range(400_000):
        tracer.s += 0.216
        lane.enter(names[k % 2])
    lane.close()
    assert len(tracer.slices) < 40_000
