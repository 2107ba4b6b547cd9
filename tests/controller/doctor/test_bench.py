"""The doctor's short measurements: their words say no more than the spread allows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fake_machine import FakeMachine

from areal_like.errors import OperationError
from controller.doctor.bench import compare, measures, reference
from controller.doctor.bench.compare import Measure, judge, ratio, spread
from controller.doctor.bench.reference import Figure
from controller.doctor.finding import Line
from controller.doctor.machine import Machine, Ran

SPEED = Measure("speed", "speed", "GFLOP/s", 1e9)
TIME = Measure("time", "time", "ms", 1e-3, is_time=True)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"speed": Figure(100e9, 90e9, 110e9), "time": Figure(0.010, 0.009, 0.012)}
    monkeypatch.setattr(compare, "FIGURES", table)


def test_spread_is_median_lowest_and_highest() -> None:
    assert spread([3.0, 1.0, 2.0, 9.0, 2.5]) == Figure(2.5, 1.0, 9.0)


def test_ratio_is_of_speeds_and_as_wide_as_both_spreads() -> None:
    faster = ratio(Figure(200.0, 180.0, 220.0), Figure(100.0, 90.0, 110.0), is_time=False)
    assert (faster.median, faster.low, faster.high) == (2.0, 180 / 110, 220 / 90)
    slower = ratio(Figure(0.02, 0.018, 0.03), Figure(0.01, 0.01, 0.01), is_time=True)
    assert (slower.median, slower.low, slower.high) == (0.5, 0.01 / 0.03, 0.01 / 0.018)


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([130e9, 129e9, 131e9, 130e9, 132e9], "130 GFLOP/s (129 to 132): 1.3x the reference"),
        ([95e9, 94e9, 100e9, 96e9, 90e9], "about the reference (0.95x, within the spread)"),
        ([130e9, 80e9, 140e9, 150e9, 131e9], "about the reference (1.3x, within the spread)"),
        ([60e9, 61e9, 59e9, 60e9, 60e9], "0.60x the reference"),
    ],
)
def test_difference_is_claimed_only_beyond_the_spread(values: list[float], words: str) -> None:
    found = judge(SPEED, values, is_busy=False)
    assert words in found.found
    assert found.verdict == "ok"


@pytest.mark.usefixtures("figures")
def test_far_below_the_reference_is_a_warning_unless_the_machine_is_busy_or_the_spread_wide() -> None:
    slow = [30e9, 31e9, 29e9, 30e9, 30e9]
    assert judge(SPEED, slow, is_busy=False).verdict == "warning"
    assert judge(SPEED, slow, is_busy=True).verdict == "ok"
    assert judge(SPEED, [*slow, 80e9], is_busy=False).verdict == "ok"
    assert judge(TIME, [0.05] * 5, is_busy=False).verdict == "warning"


def test_measure_without_a_reference_figure_is_given_alone() -> None:
    found = judge(Measure("unknown", "n", "MB/s", 1e6), [2e6] * 5, is_busy=False)
    assert (found.verdict, found.found) == ("ok", "2 MB/s (2 to 2)")


# ---------------------------------------------------------------- the reference


def test_reference_has_every_measure_with_an_ordered_spread() -> None:
    keys = {measure.key for _, _, group in measures.GROUPS for measure in group}
    assert set(reference.FIGURES) == keys
    for figure in reference.FIGURES.values():
        assert 0 < figure.low <= figure.median <= figure.high


def test_committed_engine_benchmark_is_reported_with_its_own_machine_and_day() -> None:
    result = json.loads(measures.ENGINE_RESULT.read_text())
    found = measures.engine_speed()
    assert found is not None
    assert found.tokens_per_s > 0
    assert found.machine == f"{result['machine']['cpu']}, {result['date'][:10]}"


def test_engine_result_that_is_not_at_hand_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measures, "ENGINE_RESULT", tmp_path / "engine.json")
    assert measures.engine_speed() is None
    (tmp_path / "engine.json").write_text("{}")
    assert measures.engine_speed() is None


# ---------------------------------------------------------------- measuring


def by_name(lines: list[Line]) -> dict[str, Line]:
    return {line.name: line for line in lines}


def test_measurement_that_fails_or_hangs_says_so_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: Machine) -> measures.Values:
        raise OperationError("no torch")

    def hang(machine: Machine) -> measures.Values:
        time.sleep(1.0)
        return {}

    fine = Measure("fine", "fine", "MB/s", 1e6)
    groups = (
        (fail, 5.0, (SPEED,)),
        (hang, 0.05, (TIME,)),
        (lambda machine: {"fine": [1e6] * 5}, 5.0, (fine,)),
    )
    monkeypatch.setattr(measures, "GROUPS", groups)
    monkeypatch.setattr(measures, "busy_share", lambda: 0.0)
    lines = by_name(measures.measure_all(FakeMachine()))
    assert "no torch" in lines["speed"].finding.found
    assert "no result within 0.05 s" in lines["time"].finding.found
    assert lines["fine"].finding.verdict == "ok"


def test_whole_budget_is_less_than_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measures.TOTAL_S < 30
    monkeypatch.setattr(measures, "TOTAL_S", 0.0)
    monkeypatch.setattr(measures, "busy_share", lambda: 0.0)
    lines = measures.measure_all(FakeMachine(answers={"arithmetic": "too late"}))
    assert {line.finding.verdict for line in lines[1:]} == {"warning"}


def test_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "GROUPS", ())
    monkeypatch.setattr(measures, "busy_share", lambda: 0.8)
    (line,) = measures.measure_all(FakeMachine())
    assert "Other programs use 80% of the cores" in line.finding.found


@pytest.mark.processes
def test_loopback_and_disk_are_measured_in_their_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measures, "PIECE_S", 0.001)
    monkeypatch.setattr(measures, "WRITE_BYTES", 4096)
    machine = Machine(tmp_path)
    found = {**measures.loopback(machine), **measures.disk(machine)}
    assert {key: len(values) for key, values in found.items()} == {"messages": 5, "stream": 5, "write": 5}
    assert all(value > 0 for values in found.values() for value in values)
    assert list(tmp_path.iterdir()) == []


def test_start_of_python_is_timed_and_its_failure_reported() -> None:
    assert len(measures.start(FakeMachine(says=lambda argv: Ran(0)))["start"]) == measures.REPEATS
    with pytest.raises(OperationError, match="python: no result within 5 s"):
        measures.start(FakeMachine(says=lambda argv: Ran(None, fault="no result within 5 s")))


def test_broken_torch_fails_the_arithmetic_alone() -> None:
    with pytest.raises(OperationError, match="torch: ended by SIGILL"):
        measures.arithmetic(FakeMachine(answers={"arithmetic": "ended by SIGILL"}))
