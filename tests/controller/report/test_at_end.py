"""A run's report is drawn while the run ends: whatever happens to it is one line on the screen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from controller.report import at_end

pytestmark = pytest.mark.processes


def test_folder_that_holds_no_run_gives_a_line_with_the_reason(tmp_path: Path) -> None:
    line = at_end.draw_report(tmp_path)
    assert line.startswith("no report: ")
    assert str(tmp_path) in line


def test_drawing_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", run)
    assert "longer than" in at_end.draw_report(tmp_path)


def test_interpreter_that_cannot_start_is_a_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_end.sys, "executable", str(tmp_path / "absent"))
    assert "no report: " in at_end.draw_report(tmp_path)
