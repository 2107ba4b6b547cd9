"""Claims about the trainer's state: what counts as work and as waiting, what is drawn, what heartbeats say."""

from __future__ import annotations

import contextlib
from typing import Any

from areal_like.trace import MAIN_LANE, arrow_name
from trainer.activity import ARRIVAL_S, Activity


class Timeline:
    """A tracer and a clock in one: time passes only when a test says so."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.slices: list[tuple[str, float, float, str, dict[str, Any]]] = []
        self.arrows: list[tuple[str, float]] = []

    def clock(self) -> float:
        return 7.0 + self.time_s

    def now_s(self) -> float:
        return self.time_s

    def complete(self, name: str, start_s: float, end_s: float, lane: str = MAIN_LANE, **args: Any) -> None:
        self.slices.append((name, start_s, end_s, lane, args))

    def draws(self, group_id: int) -> bool:
        return group_id % 2 == 0

    def arrow_end(self, name: str, at_s: float) -> None:
        self.arrows.append((name, at_s))


def make() -> tuple[Activity, Timeline]:
    timeline = Timeline()
    return Activity(timeline, timeline.clock), timeline  # type: ignore[arg-type]


def test_time_is_waiting_in_states_that_wait_and_work_in_all_others() -> None:
    activity, timeline = make()
    timeline.time_s += 1
    with activity.state("wait:batch"):
        timeline.time_s += 10
        assert activity.times() == {"busy_s": 1.0, "wait_s": 10.0}
        assert activity.times() == {"busy_s": 1.0, "wait_s": 10.0}, "asking changes nothing"
        timeline.time_s += 2
    with activity.state("forward_backward"):
        timeline.time_s += 100
        with activity.state("wait:x"):
            timeline.time_s += 1000
        timeline.time_s += 300
    timeline.time_s += 5
    assert activity.times() == {"busy_s": 406.0, "wait_s": 1012.0}


def test_state_is_as_before_when_its_code_has_ended_or_failed() -> None:
    activity, _ = make()
    assert activity.heartbeat({}).state == "start"
    with activity.state("serve"):
        with contextlib.suppress(KeyError), activity.state("publish"):
            assert activity.heartbeat({}).state == "publish"
            raise KeyError
        assert activity.heartbeat({}).state == "serve"
    assert activity.heartbeat({}).state == "start"


def test_one_state_inside_another_cuts_it_in_two_and_nothing_is_drawn_between_states() -> None:
    activity, timeline = make()
    timeline.time_s += 1
    with activity.state("forward_backward", step=3):
        timeline.time_s += 1
        with activity.state("publish", version=2):
            timeline.time_s += 1
        timeline.time_s += 1
    timeline.time_s += 1
    with activity.state("serve"):
        pass
    assert timeline.slices == [
        ("forward_backward", 101.0, 102.0, MAIN_LANE, {"step": 3}),
        ("publish", 102.0, 103.0, MAIN_LANE, {"version": 2}),
        ("forward_backward", 103.0, 104.0, MAIN_LANE, {"step": 3}), ("serve", 105.0, 105.0, MAIN_LANE, {}),
    ]  # fmt: skip


def test_slices_have_their_lane_and_micro_batches_are_counted_in_one_of_their_own() -> None:
    activity, timeline = make()
    for name, lane in (("micro_batch", MAIN_LANE), ("update", MAIN_LANE), ("packing", "packing"), ("micro_batch", "x")):
        with activity.span(name, lane, step=1):
            timeline.time_s += 2
    with contextlib.suppress(KeyError), activity.span("default"):
        raise KeyError
    lanes = ["micro-batches", MAIN_LANE, "packing", "micro-batches", MAIN_LANE]
    assert [slice_[3] for slice_ in timeline.slices] == lanes
    assert timeline.slices[1] == ("update", 102.0, 104.0, MAIN_LANE, {"step": 1})
    assert activity.num_micro_batches == 2


def test_arrows_of_drawn_groups_end_just_inside_the_present_state() -> None:
    activity, timeline = make()
    timeline.time_s += 1
    with activity.state("forward_backward"):
        timeline.time_s += 1
        activity.arrive([(2, 0), (3, 0), (4, 1)])
    assert timeline.arrows == [(arrow_name(2, 0), 101.0 + ARRIVAL_S), (arrow_name(4, 1), 101.0 + ARRIVAL_S)]
    assert 0 < ARRIVAL_S < 1e-3


def test_without_a_tracer_states_and_slices_count_all_the_same() -> None:
    activity = Activity()
    with activity.state("serve"), activity.span("micro_batch"):
        activity.arrive([(2, 0)])
    assert activity.num_micro_batches == 1


def test_heartbeat_brings_the_callers_counters_and_its_own() -> None:
    activity, timeline = make()
    timeline.time_s += 4
    fresh = activity.heartbeat({}).counters
    assert {name: value for name, value in fresh.items() if name != "cpu_s"} == {
        "micro_batches": 0.0, "refused_batches": 0.0, "checkpoints": 0.0, "failed_checkpoints": 0.0,
        "put_off_checkpoints": 0.0, "busy_s": 4.0, "wait_s": 0.0,
    }  # fmt: skip
    activity.num_micro_batches, activity.num_refused, activity.num_checkpoints = 1, 2, 3
    activity.num_failed_checkpoints, activity.num_put_off_checkpoints = 4, 5
    counters = activity.heartbeat({"tokens": 9.0}).counters
    assert {
        "micro_batches": 1.0, "refused_batches": 2.0, "checkpoints": 3.0, "failed_checkpoints": 4.0,
        "put_off_checkpoints": 5.0, "busy_s": 4.0, "wait_s": 0.0, "tokens": 9.0,
    }.items() <= counters.items()  # fmt: skip
    assert counters["cpu_s"] > 0
