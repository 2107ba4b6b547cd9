"""An interrupted benchmark goes on with the rows it has."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.measured import Measured, add_options

pytestmark = pytest.mark.processes


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


def test_without_going_on_all_is_measured_reopened_and_what_is_left_out_is_said(tmp_path: Path, capsys) -> None:
    machine = Machine()
    Measured(tmp_path / "rows").row([1], machine.measure)
    reopened = Measured(tmp_path / "rows")
    assert "1 rows of an interrupted call exist; --go-on uses them" in capsys.readouterr().out
    assert reopened.row([1], machine.measure)["speed"] == 2.0
    again = Measured(tmp_path / "rows", is_going_on=True)
    assert again.row([1], machine.measure)["speed"] == 2.0, "the newest"


def test_a_torn_line_is_one_row_less(tmp_path: Path) -> None:
    machine = Machine()
    Measured(tmp_path / "rows").row([1], machine.measure)
    with (tmp_path / "rows").open("a") as file:
        file.write('{"key": ["2"], "da')
    again = Measured(tmp_path / "rows", is_going_on=True)
    assert [again.row([number], machine.measure)["speed"] for number in (1, 2)] == [1.0, 2.0]


def test_a_config_that_changed_is_another_row(tmp_path: Path) -> None:
    machine, config = Machine(), tmp_path / "mine.yaml"
    for text in ("seed: 1", "seed: 2"):
        config.write_text(text)
        Measured(tmp_path / "rows", is_going_on=True).row([config], machine.measure)
    assert machine.count == 2


@pytest.mark.parametrize(
    "word", ["mine.yaml", "sampling.forced_lengths=lengths.json", "data.train.path=data/rows.jsonl"]
)
def test_a_file_that_an_override_names_is_part_of_the_key(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    machine, file = Machine(), tmp_path / word.rpartition("=")[2]
    file.parent.mkdir(exist_ok=True)
    for text in ("[1, 2]", "[1, 2]", "[3, 4]"):
        file.write_text(text)
        Measured(tmp_path / "rows", is_going_on=True).row([word], machine.measure)
    assert machine.count == 2


def test_a_word_too_long_for_a_file_name_is_a_word(tmp_path: Path) -> None:
    machine = Machine()
    assert Measured(tmp_path / "rows").row(["reward.scorers=" + 5000 * "x"], machine.measure)["speed"] == 1.0


def test_a_finished_benchmark_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.set_defaults(quick=False)
    options, machine = parser.parse_args(["--runs-dir", str(tmp_path), "--go-on"]), Machine()
    measured = Measured.of("speed", options)
    measured.row([1], machine.measure)
    measured.finish()
    assert Measured.of("speed", options).row([1], machine.measure)["speed"] == 2.0


def test_what_another_call_left_is_kept_and_a_quick_form_keeps_nothing(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--quick", action="store_true")
    whole, quick = (parser.parse_args([*words, "--runs-dir", str(tmp_path)]) for words in ([], ["--quick"]))
    machine = Machine()
    Measured.of("speed", whole).row(["long"], machine.measure)
    for options in (quick, whole):
        other = Measured.of("speed", options)
        other.row(["short", options.quick], lambda: {"speed": 0.0})
        other.finish()
    rows = Measured.of("speed", parser.parse_args(["--go-on", "--runs-dir", str(tmp_path)]))
    assert rows.row(["long"], machine.measure)["speed"] == 1.0
