"""Claims about comparing runs: tables, curves, and runs that did not get far."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from report_run import HOSTILE, report_run, write_metrics

from areal_like.errors import UserError
from controller.report import picture
from controller.report.compare import Side, compare, config_rows, sections, summary_rows
from controller.report.data import RunData
from controller.report.overview import figures


def two_runs(folder):
    return [
        report_run(folder, "slow", has_traces=False),
        report_run(folder, "fast", has_traces=False, step_s=2.0, staleness=4, num_steps=40),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Not to be changed."""
    return two_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def own_runs(tmp_path):
    """The same, to be changed."""
    return two_runs(tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Without the picture, which takes most of the time. Returns the paths where it would be."""
    paths = []
    monkeypatch.setattr(picture, "save", lambda figure, path: paths.append(path))
    return paths


def sides(folders):
    return [Side(folder.name, RunData.load(folder), place) for place, folder in enumerate(folders)]


def line(text: str, label: str) -> list[str]:
    return next(one for one in text.splitlines() if one.startswith(label)).removeprefix(label).split()


def test_the_table_says_what_came_out_and_by_how_much_it_differs(runs, tmp_path, undrawn):
    text = compare(runs, tmp_path / "out")
    assert line(text, "samples/s") == ["3.00", "6.00", "2.00"]
    assert line(text, "steps") == ["30", "40"]
    assert line(text, "accuracy, last") == ["0.900", "0.900"]
    assert line(text, "time from first lease to last step, s") == ["120.0", "80.0", "0.67"]


def test_the_trainers_wait_is_the_number_of_each_runs_own_page(own_runs):
    summary = json.loads(own_runs[0].summary.read_text()) | {"trainer_wait_share": 0.31}
    own_runs[0].summary.write_text(json.dumps(summary))
    own_runs[1].summary.unlink()
    both = sides(own_runs)
    row = next(row for row in summary_rows(both) if row.label == "trainer waited, share")
    assert list(row.cells) == ["20.0%", "20.0%"]
    for side in both:
        assert [one.value for one in figures(side.data) if one.label == "trainer waited"] == ["20 %"]


def test_only_what_was_set_differently_is_listed(runs):
    assert {row.label: list(row.cells) for row in config_rows(sides(runs))} == {
        "num_steps": ["30", "40"],
        "staleness.max_staleness": ["2", "4"],
    }


@pytest.mark.usefixtures("undrawn")
def test_runs_set_alike_are_called_so(tmp_path):
    text = compare([report_run(tmp_path, "one", has_traces=False), report_run(tmp_path, "one", has_traces=False)])
    assert "all settings are the same" in text


def test_page_and_picture_lie_where_they_are_asked_for(runs, tmp_path):
    text = compare(runs, tmp_path / "a" / "b")
    assert text.endswith(f"{tmp_path}/a/b/compare.html\n{tmp_path}/a/b/compare.png")
    assert (tmp_path / "a" / "b" / "compare.html").is_file()
    assert (tmp_path / "a" / "b" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_page_and_picture_lie_next_to_the_first_run_otherwise(own_runs, tmp_path, undrawn):
    compare(own_runs)
    assert (tmp_path / "compare.html").is_file()
    assert undrawn == [tmp_path / "compare.png"]


@pytest.mark.usefixtures("undrawn")
def test_runs_of_one_name_are_distinguished(tmp_path):
    folders = [report_run(tmp_path / place, "same", num_steps=2, has_traces=False) for place in ("x", "y")]
    text = compare(folders, tmp_path)
    assert "x/same (1)" in text
    assert "y/same (2)" in text


def test_curves_by_time_go_forward_also_over_a_resume(own_runs):
    folder = own_runs[0]
    rows = [{"kind": "step", "step": n, "reward_mean": 0.5, "wall_s": float(n % 10 + 1)} for n in range(1, 30)]
    write_metrics(folder, rows)
    chart = next(c for s in sections(sides(own_runs)) for c in s.charts if c.key == "chart-reward-time")
    xs = chart.series[0].xs
    assert len(xs) == 29
    assert all(before <= after for before, after in pairwise(xs))


def test_a_run_that_did_not_get_far_takes_part_with_gaps(runs, tmp_path):
    empty = report_run(
        tmp_path, "empty", num_steps=0, has_pulses=False, has_traces=False, has_ledger=False, status="failed"
    )
    (empty.root / "config.yaml").write_bytes(b"\x00: [")
    rows = {row.label: list(row.cells) for row in summary_rows(sides([*runs, empty]))}
    assert rows["status"] == ["finished", "finished", "failed"]
    assert rows["samples/s"][2] == "-"
    assert "empty" in compare([*runs, empty], tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_words_of_a_run_stay_words(runs, tmp_path):
    hostile = report_run(tmp_path, "a<b>", words=HOSTILE, has_traces=False)
    compare([*runs, hostile], tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert "<script>alert" not in page
    assert "<img" not in page.split("<script", 1)[0]
    assert "a&lt;b&gt;" in page


def test_twenty_runs_can_be_compared(tmp_path):
    folders = [report_run(tmp_path, "many", num_steps=3, has_traces=False, has_pulses=False) for _ in range(20)]
    text = compare(folders, tmp_path)
    assert "many-20" in text


def test_one_run_is_no_comparison(runs):
    with pytest.raises(UserError, match="two runs"):
        compare(runs[:1])
