"""A result file becomes a page with table and plot, whatever wrote it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import folders, page, plots, runs
from benchmarks.panels import panels_of

FILES = sorted(folders.RESULTS.glob("*.json"))


@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_every_published_result_has_a_table_and_a_plot_with_its_numbers(source: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copy(source, tmp_path))
    text = page.publish(source.stem, mine).read_text()
    assert "<table>" in text
    assert json.loads(source.read_text())["command"].strip() in text
    assert (tmp_path / f"{source.stem}.svg").is_file()
    (described,) = re.findall(r"<desc>(.+?)</desc>", text)
    assert re.search(r"\d", described), "the numbers, for who cannot see the plot"
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text), "the page loads nothing"


def test_values_and_their_spread_are_drawn_where_they_were_measured(tmp_path: Path) -> None:
    case = {"workload": "equal", "slots": 16, "ratio": {"generate": {"median": 1.5, "low": 1.4, "high": 1.7}}}
    (panel,) = panels_of("engine", {"cases": [case]})
    assert panel.places == ["equal, 16 slots: generate"]
    assert (panel.series[0].values, panel.series[0].spread(0)) == ([1.5], (1.4, 1.7))
    source = tmp_path / "engine.json"
    source.write_text("{}")
    picture = plots.draw("engine", [panel], source, tmp_path / "engine.svg")
    assert "equal, 16 slots: generate 1.5" in picture.read_text()
    assert panels_of("unknown", {}) == []


def test_a_seed_that_never_got_there_leaves_a_gap() -> None:
    rows = [{"side": "trl", "seed": 1, "time_to_s": None, "samples_per_s": 9.0}]
    first, second = panels_of("peer_trl", {"accuracy": 0.9, "rows": rows})
    assert first.series[0].values == [None]
    assert second.series[0].values == [9.0]


@pytest.mark.processes
def test_a_result_is_kept_where_nothing_can_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    monkeypatch.delitem(sys.modules, "benchmarks.page")
    path = runs.write("delta", "python -m benchmarks.delta", {"rows": []}, tmp_path / "delta.json")
    assert json.loads(path.read_text())["rows"] == []
    assert "markdown_it is not installed" in capsys.readouterr().out
    assert not path.with_suffix(".html").exists()


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["page", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match=r"none.json does not exist; a benchmark writes it: python -m benchmarks"):
        page.main()


def test_a_file_of_another_kind_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modes.json").write_text('{"some": "thing"}')
    monkeypatch.setattr(sys, "argv", ["page", str(tmp_path / "modes.json")])
    with pytest.raises(SystemExit, match=r"is not a result that `python -m benchmarks.modes` writes"):
        page.main()


def test_a_picture_of_earlier_numbers_does_not_stay_where_nothing_is_drawn(tmp_path: Path) -> None:
    source = tmp_path / "unknown.json"
    source.write_text(json.dumps({"command": "python -m benchmarks.unknown"}))
    source.with_suffix(".svg").write_text("<svg>old</svg>")
    assert "old" not in page.publish("unknown", source).read_text()
    assert not source.with_suffix(".svg").exists()


def test_runs_with_kills_and_faults_are_drawn() -> None:
    (panel,) = panels_of("killed_runs", {"agents": {"trained": 1080, "kills": {"program": 45, "controller": 2}}})
    assert (panel.places, [series.values for series in panel.series]) == (["agents"], [[1080], [47]])
    faults = [{"fault": "full disk", "recovery_s": 3.0}, {"fault": "full disk", "recovery_s": 5.0}]
    (panel,) = panels_of("chaos", {"faults": faults})
    assert (panel.series[0].values, panel.series[0].spread(0)) == ([4.0], (3.0, 5.0))
