"""Where a session starts, and what of earlier sessions its totals include."""

from __future__ import annotations

from pathlib import Path

from ledger_entries import admit, finished, lineage, shipped

from controller.coordinator.effects import RecordEval
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.runtime.starting_point import StartingPoint, restore_tally
from controller.telemetry.summary import Tally


def test_totals_go_on_from_the_steps_and_evaluations_that_the_checkpoint_covers(tmp_path: Path) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply([lineage()])
        for step in (1, 2, 3):
            ledger.apply([admit(step - 1), finished(step - 1, [0]), shipped(step, step - 1)])
            evaluation = RecordEval(version=step, lineage="l0", kind="periodic", values=(1.0,))
            ledger.apply([LedgerEntry(effect=evaluation)])
        start, tally = StartingPoint(ledger.load(), version=2), Tally()
        restore_tally(tally, ledger, start, tmp_path / "metrics.jsonl")
    assert start.lineage == "l1"
    assert tally.steps == 2
    assert sorted(tally.accuracy) == [1, 2]
