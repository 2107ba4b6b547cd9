"""The table of drawn against trained: its numbers, its verdict, and the warning about sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_run import made_run, step_rows
from report_run import report_run

from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.drawn import comparison
from controller.report.page import write_report

SAME = {"samples": 400, "tokens": 40_000, "mean": 100.0, "p50": 90, "p99": 300}
FEWER = {"samples": 300, "tokens": 24_000, "mean": 80.0, "p50": 85, "p99": 140}
LOST = {"stale": {"samples": 100, "tokens": 16_000, "mean": 160.0, "p50": 150, "p99": 300, "unfinished": 9}}


def run(lengths: dict[str, Any] | None, sources: dict[str, Any] | None = None) -> RunData:
    summary: dict[str, Any] = {"audit": "clean"}
    summary |= {"lengths": lengths} if lengths else {}
    summary |= {"sources": sources} if sources else {}
    return made_run(steps=step_rows(), summary=summary)


def test_a_run_that_lost_nothing_says_so() -> None:
    found = comparison(run({"drawn": SAME, "trained": SAME, "lost": {}, "shift": 0.0, "shift_z": 0.0}))
    assert found.words.startswith("Every drawn sample of an ended group was used for training")
    assert {line.name: (line.drawn, line.trained) for line in found.lines}["99th percentile"] == ("300", "300")


def test_lost_tokens_and_both_verdicts_are_named() -> None:
    lengths = {"drawn": SAME, "trained": FEWER, "lost": LOST, "shift": -0.2, "shift_z": -7.0}
    sources = {
        "drawn": {"data.mix.0": 100, "data.train": 300}, "trained": {"data.mix.0": 30, "data.train": 270},
        "lost": {"data.mix.0": 70, "data.train": 30}, "shift_z": {"data.mix.0": -11.6, "data.train": 11.6},
    }  # fmt: skip
    found = comparison(run(lengths, sources))
    assert (
        "do not have the same distribution as the drawn ones: lengths differ by 20 % (7.0 standard errors), sources by "
        "11.6" in (found.words)
    )
    assert "Stale: 100 samples with 16,000 tokens." in found.words
    assert ("groups of data.mix.0", "25 %", "10 %") in found.lines
    (warning,) = [one for one in diagnose(run(lengths, sources)) if one.kind == "source_shift"]
    assert (
        warning.title == "The source data.mix.0 has 10 % of the groups used for training, but 25 % of the drawn groups"
    )
    even = {**sources, "shift_z": {"data.mix.0": 1.5, "data.train": -1.5}}
    found = comparison(run({**lengths, "shift_z": -1.0}, even))
    assert (
        "The trained samples have the same distribution as the drawn ones: lengths differ by 1.0 standard errors, "
        "sources by 1.5." in (found.words)
    )
    assert not [one for one in diagnose(run(lengths, even)) if one.kind == "source_shift"]


def test_groups_without_any_answer_are_losses_too() -> None:
    data = run({"drawn": SAME, "trained": SAME, "lost": {}, "shift": 0.0, "shift_z": 0.0})
    assert data.summary is not None
    data.summary["dropped_by_reason"] = {"prompt_too_long": 12}
    words = comparison(data).words
    assert words.startswith("12 drawn groups ended before they had an answer. All other samples")
    assert "Prompt too long: 12 groups without an answer." in words
    data.summary["lengths"] |= {"trained": FEWER, "lost": LOST, "shift_z": -7.0}
    words = comparison(data).words
    assert "do not have the same distribution as the drawn ones" in words
    assert "Prompt too long: 12 groups without an answer. Stale: 100 samples" in words


def test_groups_that_a_filter_removed_are_no_loss() -> None:
    sources = {
        "drawn": {"data.mix.0": 200, "data.train": 200}, "trained": {"data.mix.0": 50, "data.train": 200},
        "filtered": {"data.mix.0": 150}, "shift_z": {"data.mix.0": 0.0, "data.train": 0.0},
    }  # fmt: skip
    assert not [one for one in diagnose(run(None, sources)) if one.kind == "source_shift"]


def test_the_page_has_the_table_or_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.report.page.save", lambda figure, path: None)  # the picture takes most of the time
    page = write_report(report_run(tmp_path, has_traces=False)).read_text()
    assert "Drawn and trained" in page
    assert "available after a run with training steps has ended" in page
