"""The summary, the report and `status --why` show one number for the trainer's waiting time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_run import report_run

from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.overview import figures
from controller.report.shares import measure, summary_shares
from controller.run_folder.formatting import percent
from controller.run_folder.run_folder import RunFolder
from controller.telemetry.summary import write_summary
from controller.telemetry.summary_page import sentences

OF_THE_SESSION = {"trainer_wait_share": 0.6, "rollout_idle_share": 0.5, "rollout_paused_share": 0.1}
"""What the tally counted, start and end included."""


def ended(runs_dir: Path, **facts: Any) -> RunFolder:
    """A run whose summary was written as at the end of a session."""
    folder = report_run(runs_dir, **facts)
    summary = json.loads(folder.summary.read_text()) | OF_THE_SESSION
    write_summary(folder.summary, summary | summary_shares(folder, summary))
    return folder


@pytest.mark.parametrize(
    ("facts", "is_steady"),
    [({}, True), ({"num_steps": 3}, False), ({"has_pulses": False}, False), ({"num_steps": 1}, False)],
    ids=["steady", "short", "without pulses", "one step"],
)
def test_summary_and_diagnosis_have_the_same_shares(tmp_path: Path, facts: dict[str, Any], is_steady: bool) -> None:
    data = RunData.load(ended(tmp_path, **facts))
    shares = measure(data)
    assert shares.is_steady == is_steady
    assert data.summary is not None
    assert data.summary["trainer_wait_share"] == pytest.approx(shares.trainer_wait, abs=5e-5)
    assert data.summary["rollout_idle_share"] == pytest.approx(shares.rollout_idle, abs=5e-5)
    assert data.summary["rollout_paused_share"] == pytest.approx(shares.rollout_paused, abs=5e-5)
    if is_steady:
        assert data.summary["trainer_wait_share"] != OF_THE_SESSION["trainer_wait_share"]


def test_the_pages_show_the_same_percentage(tmp_path: Path) -> None:
    data = RunData.load(ended(tmp_path))
    waited = percent(measure(data).trainer_wait)
    assert data.summary is not None
    assert any(f"the trainer waited {waited} of its time" in line for line in sentences(data.summary))
    (figure,) = [one for one in figures(data) if one.label == "trainer waited"]
    assert figure.value == waited
    words = [part for found in diagnose(data) for part in (found.title, found.detail) if "rainer waited" in part]
    assert all(waited in part for part in words)


def test_a_folder_that_cannot_be_read_leaves_the_summary_as_it_is(tmp_path: Path) -> None:
    assert summary_shares(RunFolder(tmp_path / "none"), OF_THE_SESSION) == {}
