"""Claims about what a worker as a whole does, and where the time goes in which nothing generates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_like.clock import VirtualClock
from areal_like.trace import Tracer
from rollout.activity import WorkerActivity


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def doing(clock):
    made = WorkerActivity(clock, Tracer(Path(), "w", max_events=0))
    clock.advance(100.0)
    made.ready()
    return made


def test_start_up_is_no_wait(doing):
    assert doing.state == "wait:work"
    assert set(doing.counters().values()) == {0.0}


def test_every_second_without_generation_has_one_cause(doing, clock):
    clock.advance(1.0)  # no lease
    doing.loading(True)
    clock.advance(2.0)
    doing.moved("end", "start")
    doing.moved("start", "version")
    clock.advance(3.0)  # it waits for the version that is being loaded
    doing.loading(False)
    doing.moved("version", "generate")
    clock.advance(50.0)
    doing.moved("generate", "start")
    clock.advance(4.0)  # a tool of the workflow
    doing.moved("start", "score")
    clock.advance(5.0)
    doing.moved("score", "teacher")
    clock.advance(7.0)
    doing.moved("teacher", "end")
    clock.advance(6.0)
    assert doing.counters() == {
        "wait_work_s": 7.0, "load_s": 2.0, "wait_version_s": 3.0, "workflow_s": 4.0, "wait_score_s": 5.0,
        "wait_teacher_s": 7.0, "wait_traffic_s": 0.0,
    }  # fmt: skip


def test_a_worker_waits_for_clients_only_while_nothing_else_is_done(doing, clock):
    doing.moved("end", "traffic")
    doing.moved("end", "traffic")
    assert doing.state == "wait:traffic"
    clock.advance(3.0)
    doing.moved("traffic", "generate")
    assert doing.state == "generate"
    clock.advance(5.0)
    doing.moved("generate", "traffic")
    doing.loading(True)
    assert doing.state == "load"
    doing.loading(False)
    clock.advance(1.0)
    assert doing.counters()["wait_traffic_s"] == 4.0


def test_scores_hold_the_worker_up_only_while_nothing_generates(doing, clock):
    for _ in range(2):
        doing.moved("end", "generate")
    doing.moved("generate", "score")
    clock.advance(9.0)
    assert doing.state == "generate"
    assert doing.counters()["wait_score_s"] == 0.0
    doing.moved("generate", "version")
    clock.advance(1.0)
    assert doing.state == "wait:score", "the verdict comes from elsewhere, the version as well: scoring is named first"
    assert doing.counters()["wait_score_s"] == 1.0


def test_counters_never_fall(doing, clock):
    before, phase = doing.counters(), "end"
    for following in ("start", "generate", "score", "version", "generate", "score", "end"):
        doing.moved(phase, following)
        phase = following
        clock.advance(0.5)
        now = doing.counters()
        assert all(now[key] >= before[key] for key in before)
        before = now


def test_the_timeline_has_one_slice_for_each_state_and_one_for_each_swap(clock):
    slices = []
    tracer = SimpleNamespace(
        now_s=clock.monotonic_s, complete=lambda name, start_s, end_s, lane: slices.append((name, start_s, end_s))
    )
    start_s = clock.monotonic_s()
    doing = WorkerActivity(clock, tracer)
    clock.advance(1.0)
    doing.ready()
    doing.ready()
    clock.advance(1.0)
    doing.moved("end", "generate")
    clock.advance(4.0)
    doing.moved("end", "generate")
    doing.swapped(0.5)
    clock.advance(1.0)
    doing.close()
    assert [(name, begin_s - start_s, end_s - start_s) for name, begin_s, end_s in slices] == [
        ("load", 0.0, 1.0), ("wait:work", 1.0, 2.0), ("generate", 2.0, 5.5), ("swap", 5.5, 6.0), ("generate", 6.0, 7.0),
    ]  # fmt: skip


def test_until_it_is_ready_a_worker_loads_whatever_its_samples_do(clock):
    doing = WorkerActivity(clock, Tracer(Path(), "w", max_events=0))
    doing.moved("end", "generate")
    doing.loading(False)
    assert doing.state == "load"
    doing.ready()
    assert doing.state == "generate"
