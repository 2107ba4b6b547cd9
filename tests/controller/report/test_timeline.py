"""Claims about the activity strips: what traces and pulses say, in bins that stay few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_run import START_S, report_run, write_state, write_traces

from areal_like.trace import Tracer
from controller.report.activity_grid import MAX_BINS, ActivityGrid, NestedLane
from controller.report.data import RunData
from controller.report.timeline import MAX_PER_ROLE, Timeline, read_timeline
from controller.run_folder.run_folder import RunFolder


def timeline_of(folder: RunFolder, **limits: int) -> Timeline:
    return read_timeline(RunData.load(folder), **limits)


def bare(runs_dir) -> RunFolder:
    folder = RunFolder.create(runs_dir, "bare")
    write_state(folder, "finished")
    return folder


def strip(timeline: Timeline, name: str):
    return next(one for one in timeline.strips if one.name == name)


def test_the_time_of_each_activity_is_that_of_its_slices(tmp_path):
    found = timeline_of(report_run(tmp_path, num_steps=10, step_s=4.0, has_ledger=False))
    rollout = strip(found, "rollout-0")
    assert rollout.source == "trace"
    assert rollout.seconds == pytest.approx({"generate": 28, "wait:work": 8, "wait:score": 3.2, "swap": 0.8}, abs=0.01)
    assert strip(found, "reward").seconds["score"] == pytest.approx(6, abs=0.01)
    assert strip(found, "trainer: packing").seconds == pytest.approx({"packing": 2}, abs=0.01)


def test_a_nested_slice_takes_its_time_from_the_one_around_it(tmp_path):
    trainer = strip(timeline_of(report_run(tmp_path, num_steps=10, has_ledger=False)), "trainer")
    assert trainer.seconds["update"] == pytest.approx(2, abs=0.01)
    assert trainer.seconds["forward_backward"] == pytest.approx(26, abs=0.01)
    assert sum(trainer.seconds.values()) == pytest.approx(40, abs=0.01)


def test_strips_stand_in_the_order_of_the_pipeline(tmp_path):
    names = [
        one.name for one in timeline_of(report_run(tmp_path, num_steps=2, num_workers=11, has_ledger=False)).strips
    ]
    assert names[:3] == ["rollout-0", "rollout-1", "rollout-2"]
    assert names[-4:] == ["reward", "trainer", "trainer: packing", "controller"]


def test_shares_of_a_bin_are_never_more_than_the_whole(tmp_path):
    for one in timeline_of(report_run(tmp_path, num_steps=20, has_ledger=False)).strips:
        assert len({len(shares) for shares in one.shares.values()} | {len(one.xs_s)}) == 1
        for shares in zip(*one.shares.values(), strict=True):
            assert min(shares) >= 0
            assert sum(shares) <= 1.002


def test_a_long_run_has_no_more_bins_than_asked_for(tmp_path):
    found = timeline_of(report_run(tmp_path, num_steps=60, step_s=1000.0, has_ledger=False), max_bins=200)
    assert found.length_s / found.bin_s <= 201
    assert all(len(one.xs_s) <= 202 for one in found.strips)
    assert strip(found, "rollout-0").seconds["generate"] == pytest.approx(42_000, rel=1e-6)


def test_a_grid_stays_small_whatever_is_put_into_it():
    grid = ActivityGrid()
    for place in range(20_000):
        grid.add("generate", place * 10.0, place * 10.0 + 9.0)
    grid.add("load", 0.0, 1e7)
    assert len(grid.bins) <= MAX_BINS
    assert sum(grid.seconds["generate"].values()) == pytest.approx(180_000)


@given(st.lists(st.tuples(st.floats(0.001, 50), st.floats(0, 500), st.sampled_from("abc")), max_size=30))
def test_no_second_is_lost_or_counted_twice_however_wide_the_bins_grow(parts):
    grid, lane_s = ActivityGrid(), 1e9
    lane = NestedLane(grid)
    expected: dict[str, float] = {}
    for busy_s, rest_s, name in parts:
        lane.add(name, lane_s, lane_s + busy_s)
        expected[name] = expected.get(name, 0.0) + busy_s
        lane_s += busy_s + rest_s
    for doublings in (grid.doublings, grid.doublings + 3):
        folded = {name: sum(bins.values()) for name, bins in grid.folded(doublings).items()}
        assert folded == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_rest_before_a_resume_is_cut_out_and_marked(tmp_path):
    folder = report_run(tmp_path, num_steps=10, step_s=4.0, has_ledger=False)
    write_traces(folder, 10, 4.0, 2, start_s=START_S + 90_000)
    found = timeline_of(folder)
    assert found.length_s < 100
    assert len(found.breaks) == 1
    assert found.breaks[0].rest_s == pytest.approx(90_000 - 42.4, abs=1)
    assert strip(found, "rollout-0").seconds["generate"] == pytest.approx(56, abs=0.01)


def test_a_long_silence_within_a_stretch_stays_on_the_axis(tmp_path):
    folder = bare(tmp_path)
    tracer = Tracer(folder.logs / "trainer.trace.jsonl", "trainer")
    tracer.complete("forward_backward", START_S, START_S + 1)
    tracer.complete("forward_backward", START_S + 500, START_S + 501)
    tracer.close()
    found = timeline_of(folder)
    assert found.length_s == pytest.approx(501, abs=1)
    assert not found.breaks


def test_a_restarted_process_may_number_its_lanes_otherwise(tmp_path):
    folder = bare(tmp_path)
    path = folder.logs / "rollout-0.trace.jsonl"
    for lanes in (("main", "slot 1"), ("slot 1", "main")):
        tracer = Tracer(path, "rollout-0")
        for lane in lanes:
            tracer.complete("generate" if lane == "main" else "junk", START_S, START_S + 2, lane)
        tracer.close()
    assert set(strip(timeline_of(folder), "rollout-0").seconds) == {"generate"}


def test_cut_and_foreign_lines_of_a_trace_are_passed_over(tmp_path):
    folder = report_run(tmp_path, num_steps=10, has_ledger=False)
    path = folder.logs / "trainer.trace.jsonl"
    whole = path.read_bytes()
    path.write_bytes(
        b'\xff\xfe\n[]\n"tid":1}\n{"ph":"X","tid":1}\n{"ph":"M","name":"thread_name","args":7}\n' + whole[:-30]
    )
    assert strip(timeline_of(folder), "trainer").seconds["forward_backward"] == pytest.approx(26, abs=3)


def test_without_a_trace_pulses_say_what_a_process_did(tmp_path):
    found = timeline_of(report_run(tmp_path, num_steps=20, step_s=4.0, has_traces=False, has_ledger=False))
    rollout, trainer = strip(found, "rollout-1"), strip(found, "trainer")
    assert rollout.source == "pulses"
    assert rollout.seconds["generate"] == pytest.approx(0.7 * 80, rel=0.01)
    assert trainer.seconds == pytest.approx({"train": 64, "wait:batch": 16}, rel=0.01)
    assert set(strip(found, "reward").seconds) == {"busy"}


def test_of_many_workers_the_first_are_drawn_and_the_others_counted(tmp_path):
    found = timeline_of(report_run(tmp_path, num_steps=3, num_workers=20, has_traces=False, has_ledger=False))
    assert sum(one.role == "rollout" for one in found.strips) == MAX_PER_ROLE
    assert found.left_out == {"rollout": 20 - MAX_PER_ROLE}


def test_a_process_whose_trace_says_nothing_is_named(tmp_path):
    folder = bare(tmp_path)
    tracer = Tracer(folder.logs / "rollout-0.trace.jsonl", "rollout-0")
    tracer.complete("generate", START_S, START_S + 1, lane="slot 1")
    tracer.close()
    found = timeline_of(folder)
    assert not found.strips
    assert found.unknown == ["rollout-0"]
    assert found.missing
