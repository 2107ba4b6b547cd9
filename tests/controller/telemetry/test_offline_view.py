"""Claims about what a run from files shows: status.json, lines, the summary."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controller.telemetry.display import Display
from controller.telemetry.offline_view import OfflineView
from controller.telemetry.sinks import SinkNews, Sinks
from controller.telemetry.status import StatusFile

OPENING = {
    "kind": "offline", "objective": "sft", "num_steps": 2, "version": 0, "setup": "attention sdpa", "train_rows": 9,
    "train_rows_too_long": 1,
}  # fmt: skip


class Seen:
    """A view with its clock, its lines and the rows that a sink got."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.lines = io.StringIO()
        self.path = path
        self.offered: list[Mapping[str, Any]] = []
        sinks = Sinks([])
        sinks.offer = self.offered.append  # type: ignore[method-assign, assignment]
        display = Display("plain", Console(file=self.lines, width=200))
        status = StatusFile(path, run="r", num_steps=0, clock=lambda: self.now_s)
        self.view = OfflineView(display, status, sinks, clock=lambda: self.now_s)

    def take(self, *rows: Mapping[str, Any]) -> None:
        for row in rows:
            self.now_s += 2.0
            self.view.take(row)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path / "status.json")


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "epoch": number / 2, "loss": 0.5, "tokens": 10, **more}


def test_status_says_how_far_it_is_and_how_long_it_takes(seen: Seen) -> None:
    seen.view.look(7, 12.0)
    assert seen.status["status"] == "preparing"
    assert seen.status["processes"]["trainer"]["pid"] == 7
    seen.take(OPENING, {"kind": "eval", "version": 0, "accuracy": 0.25, "loss": 2.0, "num_scored": 4.0}, step(1))
    seen.view.look(7, 12.0)
    status = seen.status
    assert (status["status"], status["step"], status["num_steps"], status["version"]) == ("running", 1, 2, 1)
    assert status["accuracy"] == {"0": 0.25}
    assert status["last_step"]["loss"] == 0.5
    assert status["eta_s"] == 4.0  # from the opening to the first step
    assert not seen.view.is_complete


def test_summary_tells_what_changed_and_what_was_left_out(seen: Seen) -> None:
    first = {"kind": "eval", "version": 0, "accuracy": 0.25, "loss": 2.0, "num_scored": 4.0}
    seen.take(OPENING, first, step(1), step(2), {**first, "version": 2, "accuracy": 0.5, "loss": 1.0})
    assert seen.view.is_complete
    summary = seen.view.summary("finished")
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.5)
    assert (summary["loss_before"], summary["loss_after"]) == (2.0, 1.0)
    assert (summary["train_rows"], summary["train_rows_too_long"]) == (9, 1)
    assert summary["tokens_per_s"] == 2.0
    assert summary["accuracy_by_version"] == {"0": 0.25, "2": 0.5}


def test_a_resumed_run_without_a_first_evaluation_claims_no_before(seen: Seen) -> None:
    seen.take({**OPENING, "version": 1}, step(2), {"kind": "eval", "version": 2, "accuracy": 0.5, "num_scored": 4.0})
    summary = seen.view.summary("finished")
    assert summary["accuracy_before"] is None
    assert summary["accuracy_after"] == 0.5
    assert "continuing from step 1" in seen.lines.getvalue()


def test_the_first_and_the_last_step_are_shown_and_notes_are_passed_on(seen: Seen) -> None:
    seen.view.take(OPENING)
    for number in (1, 2):
        seen.view.take(step(number))
    assert "step 1/2" in seen.lines.getvalue()
    assert "step 2/2" in seen.lines.getvalue()
    seen.view.take({"kind": "note", "text": "1 of 10 rows of f are longer"})
    assert "1 of 10 rows" in seen.lines.getvalue()
    assert [row["kind"] for row in seen.offered] == ["offline", "step", "step", "note"]


def test_a_sink_that_loses_rows_is_named(seen: Seen) -> None:
    lost = SinkNews("wandb", "down", "no network", 3, 2)
    seen.view._sinks.news = lambda: [lost]  # type: ignore[method-assign]
    seen.view.look(None, None)
    assert "metrics sink wandb is down, 2 rows lost (no network)" in seen.lines.getvalue()
    seen.view._sinks.close = lambda say: [lost]  # type: ignore[method-assign]
    seen.take(OPENING, step(1))
    seen.view.close()
    assert seen.status["step"] == 1
