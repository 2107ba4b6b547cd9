"""An interrupted benchmark goes on with the rows it has."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.measured import Measured, add_options


class Machine:
    """Measures 1.0, 2.0, ... and counts."""

    def __init__(self) -> None:
        self.count = 0

    def measure(self) -> dict[str, float]:
        self.count += 1
        if self.count == 3:
            raise SystemExit("the machine was too busy")
        return {"speed": float(self.count)}


def test_going_on_takes_what_was_measured_and_measures_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, machine = tmp_path / "deep" / "speed.rows.jsonl", Machine()
    first = Measured(path)
    with pytest.raises(SystemExit):
        [first.row(["speed", seed], machine.measure) for seed in (1, 2, 3, 4)]
    again = Measured(path, is_going_on=True)
    rows = [again.row(["speed", seed], machine.measure) for seed in (1, 2, 3, 4)]
    assert [row["speed"] for row in rows] == [1.0, 2.0, 4.0, 5.0]
    assert capsys.readouterr().out.count("as measured on") == 2
    assert all(row["measured"] for row in rows), "each says when and with which commit"


def test_other_words_are_another_row(tmp_path: Path) -> None:
    machine = Machine()
    Measured(tmp_path / "rows").row(["seed=1", "lr=1"], machine.measure)
    Measured(tmp_path / "rows", is_going_on=True).row(["seed=1", "lr=2"], machine.measure)
    assert machine.count == 2


def test_without_going_on_all_is_measured_anew_and_what_is_left_out_is_said(tmp_path: Path, capsys) -> None:
    machine = Machine()
    Measured(tmp_path / "rows").row([1], machine.measure)
    anew = Measured(tmp_path / "rows")
    assert "1 rows of an interrupted call are left out" in capsys.readouterr().out
    assert anew.row([1], machine.measure)["speed"] == 2.0


def test_a_finished_benchmark_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options, machine = parser.parse_args(["--runs-dir", str(tmp_path), "--go-on"]), Machine()
    measured = Measured.of("speed", options)
    measured.row([1], machine.measure)
    measured.finish()
    assert Measured.of("speed", options).row([1], machine.measure)["speed"] == 2.0
