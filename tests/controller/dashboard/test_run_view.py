"""Claims about the content of a run's page: complete, incremental, and undisturbed by damage."""

from __future__ import annotations

import copy
import json

import pytest
from made_run import step_rows
from page_content import applied
from report_run import HOSTILE, report_run

from controller.dashboard.condensed import MAX_BINS
from controller.dashboard.run_view import RunView, surviving
from controller.run_folder.run_folder import RunFolder


@pytest.fixture
def small(tmp_path) -> RunFolder:
    return report_run(tmp_path, "small", num_steps=3, has_pulses=False, has_traces=False, has_ledger=False)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return report_run(tmp_path, "mine", num_steps=30, has_traces=False, has_ledger=False)


def append(folder: RunFolder, *rows: dict) -> None:
    with folder.metrics.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def steps(first: int, last: int, **columns) -> list[dict]:
    return step_rows(last, 4.0, **columns)[first - 1 :]


def shown_by(view: RunView) -> dict:
    """What a page that opens now gets."""
    view.refresh()
    return dict(view.snapshot())


def curve(content: dict, key: str, place: int = 0) -> dict:
    return content["charts"][key]["series"][place]


def test_the_page_of_a_run_has_what_a_reader_looks_for(folder):
    content = shown_by(RunView(folder))
    assert content["run"]["kind"] == "finished"
    assert content["run"]["refused"]["stop"] == "the run is not in progress"
    assert [section["key"] for section in content["sections"]] == [
        "learning", "speed", "staleness", "answers", "optimisation", "machine"
    ]  # fmt: skip
    for key in ("chart-learning", "chart-throughput", "chart-staleness-bound", "chart-lengths", "chart-memory"):
        assert key in content["charts"]
    bound = next(one for one in content["charts"]["chart-staleness-bound"]["series"] if one["name"] == "bound")
    assert bound["ys"] == [2, 2]
    assert {strip["label"] for strip in content["timeline"]["strips"]} >= {"rollout-0", "rollout-1", "trainer"}
    assert content["waits"][0]["words"].startswith("trainer waits for batch")
    assert {card["label"] for card in content["cards"]} >= {"step", "accuracy", "reward", "staleness, highest"}
    assert any("rollout-1 is lost" in event["text"] for event in content["events"])
    assert [answer["text"] for answer in content["held_out"][0]["answers"]] == ["it is 0 ", "it is 30 "]
    assert content["problems"] == []


def test_what_a_page_has_after_changes_is_what_a_new_page_gets(folder):
    view = RunView(folder)
    shown = copy.deepcopy(shown_by(view))
    for first in range(31, 131, 10):
        append(folder, *steps(first, first + 9), {"kind": "eval", "version": first, "accuracy": 0.9, "time_s": 1.0})
        change = json.loads(json.dumps(view.refresh()))
        shown = applied(shown, {key: part for key, part in change.items() if key != "log"})
    fresh = shown_by(RunView(folder))
    del shown["log"]
    assert shown == {key: part for key, part in json.loads(json.dumps(fresh)).items() if key != "log"}
    assert curve(shown, "chart-loss")["xs"][-1] == 130


def test_nothing_new_is_no_change(folder):
    view = RunView(folder)
    view.refresh()
    assert view.refresh() == {}


def test_one_new_step_of_a_long_run_is_a_small_message(tmp_path):
    folder = report_run(tmp_path, "long", num_steps=2000, has_pulses=False, has_traces=False, has_ledger=False)
    view = RunView(folder)
    whole = shown_by(view)
    assert len(curve(whole, "chart-loss")["xs"]) <= MAX_BINS
    assert "stands for 8 steps" in json.dumps(whole["sections"])
    append(folder, {**steps(2001, 2001, response_len_mean=5.0)[0], "staleness": [1, 2]})
    assert len(json.dumps(view.refresh())) < len(json.dumps(whole)) / 10


def test_a_resumed_run_shows_the_surviving_steps_only(folder):
    view = RunView(folder)
    view.refresh()
    append(folder, *steps(21, 22, loss=[7.0] * 22))
    view.refresh()
    content = view.snapshot()
    assert curve(content, "chart-loss")["xs"] == [float(step) for step in range(1, 23)]
    assert curve(content, "chart-loss")["ys"][-2:] == [7.0, 7.0]
    append(folder, *steps(23, 23, loss=[8.0] * 23))
    view.refresh()
    assert curve(view.snapshot(), "chart-loss")["ys"][-3:] == [7.0, 7.0, 8.0]


def test_surviving_rows_keep_the_newest_of_each_step_and_everything_else():
    rows = [
        *({"kind": "step", "step": step, "life": 1} for step in (1, 2, 3)),
        {"kind": "note"},
        *({"kind": "step", "step": step, "life": 2} for step in (2, "x", 3.0)),
    ]
    found = surviving(rows)
    assert [(row.get("step"), row.get("life")) for row in found] == [(1, 1), (None, None), (2, 2), (3, 2)]


@pytest.mark.parametrize("name", ["state.json", "config.yaml", "metrics.jsonl", "status.json"])
@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]\n", None])
def test_a_damaged_file_is_named_and_the_others_are_shown(small, name, damage):
    path = small.root / name
    path.unlink(missing_ok=True)
    if damage is not None:
        path.write_bytes(damage)
    content = shown_by(RunView(small))
    is_missing_status = name == "status.json" and damage is None
    is_empty_metrics = name == "metrics.jsonl" and damage in (
        b"",
        b"{",
        b"\xff\xfe\x00",
    )  # a line that is not whole yet
    assert bool(content["problems"]) is not (is_missing_status or is_empty_metrics)
    if name != "metrics.jsonl":
        assert "chart-learning" in content["charts"]
    if name == "state.json":
        assert content["run"]["kind"] == "damaged"


def test_an_empty_run_has_a_page(tmp_path):
    folder = RunFolder.create(tmp_path, "fresh")
    folder.write_state("running")
    content = shown_by(RunView(folder))
    assert content["charts"] == {}
    assert content["timeline"]["strips"] == []
    assert content["timeline"]["words"]


def test_text_of_a_run_is_printable_and_no_label_is_markup_for_plotly(tmp_path):
    folder = report_run(tmp_path, "mine", words=HOSTILE, has_traces=False, has_ledger=False)
    (folder.logs / "trainer.log").write_text(f"2026-01-01 00:00:00,000 {HOSTILE}\n")
    view = RunView(folder)
    view.refresh()
    content = view.snapshot()

    def texts(found):
        if isinstance(found, str):
            yield found
        for one in found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ():
            yield from texts(one)

    assert all(one.isprintable() for one in texts(content))
    assert not [one for one in texts(content["charts"]) if "<" in one]


def test_logs_come_once_each(folder):
    log = folder.logs / "trainer.log"
    log.write_text("2026-01-01 00:00:00,000 one\n")
    view = RunView(folder)
    assert view.refresh()["log"] == [["trainer", "2026-01-01 00:00:00,000 one"]]
    with log.open("a") as file:
        file.write("2026-01-01 00:00:01,000 two\n")
    assert view.refresh() == {"log": [["trainer", "2026-01-01 00:00:01,000 two"]]}
    assert len(view.snapshot()["log"]) == 2


def test_reading_a_run_changes_nothing_in_its_folder(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")}
    view = RunView(folder)
    view.refresh()
    view.refresh()
    assert {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")} == before
