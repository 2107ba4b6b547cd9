"""Where a session starts, and what of earlier sessions its totals include."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_entries import admit, finished, lineage, shipped

from controller.coordinator.effects import RecordEval
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.run_folder.run_folder import RunFolder
from controller.runtime.starting_point import StartingPoint, find_start, restore_tally
from controller.telemetry.display import Display
from controller.telemetry.summary import Tally


def test_totals_go_on_from_the_steps_and_evaluations_that_the_checkpoint_covers(tmp_path: Path) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply([lineage()])
        for step in (1, 2, 3):
            ledger.apply(
                [admit(step - 1), finished(step - 1, [step // 2]), shipped(step, step - 1, first_version=step // 2)]
            )
            evaluation = RecordEval(version=step, lineage="l0", kind="periodic", values=(1.0,))
            ledger.apply([LedgerEntry(effect=evaluation)])
        start, tally = StartingPoint(ledger.load(), version=2), Tally()
        restore_tally(tally, ledger, start, tmp_path / "metrics.jsonl")
    assert start.lineage == "l1"
    assert tally.steps == 2
    assert tally.staleness == {0: 2}, "version 1 in step 2, and version 0 in step 1"
    assert sorted(tally.accuracy) == [1, 2]


@pytest.mark.parametrize("is_resume", [False, True])
def test_a_resume_without_a_checkpoint_says_that_it_begins_with_the_starting_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_resume: bool
) -> None:
    folder = RunFolder.create(tmp_path, "run")
    with Ledger(tmp_path, run_id="r") as ledger:
        facts = {"is_resume": is_resume, "accept_loss": False}
        start = find_start(folder, ledger, ledger.load(), Display("plain"), **facts)
    assert (start.version, start.checkpoint) == (0, None)
    assert ("there is no checkpoint; continuing from the initial policy" in capsys.readouterr().out) == is_resume
