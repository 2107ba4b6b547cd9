"""Where a session starts: the state of earlier sessions in the ledger, and the checkpoint that the trainer continues
from.

Checkpoints are verified in trainer_restart.py, consistency of files in continuity.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from controller.config.eval_metrics import RED_TEAM_METRICS
from controller.coordinator.snapshot import LedgerState
from controller.ledger.ledger import Ledger
from controller.run_folder.run_folder import RunFolder
from controller.runtime.continuity import Findings, refuse
from controller.runtime.trainer_restart import find_checkpoint
from controller.telemetry.display import Display
from controller.telemetry.journal import rows_of
from controller.telemetry.summary import Tally


@dataclass(frozen=True)
class StartingPoint:
    """The state from which the coordinator is restored, and the trainer's starting checkpoint."""

    state: LedgerState
    version: int = 0
    checkpoint: Path | None = None
    """Checkpoint; None: the initial policy."""

    @property
    def lineage(self) -> str:
        """Lineage of the versions that the trainer publishes in this session."""
        return f"l{self.state.num_lineages}"


def find_start(
    folder: RunFolder, ledger: Ledger, state: LedgerState, display: Display, *, is_resume: bool, accept_loss: bool
) -> StartingPoint:
    """Find the newest intact checkpoint recorded in the ledger. Raises UserError if all are damaged."""
    found = find_checkpoint(folder.root, num_batches=len(state.batches), ledger_seq=ledger.seq)
    for words in found.left_out:
        display.note(words, "warning")
    if found.path is None and found.left_out and not accept_loss:
        refuse(folder, Findings(lossy=[*found.left_out, "there is no checkpoint from which the run could continue"]))
    if found.path is not None:
        display.note(f"continuing from {found.path} (version {found.version})")
    elif is_resume:
        display.note("there is no checkpoint; continuing from the initial policy with the recorded samples", "warning")
    return StartingPoint(state, found.version, found.path)


def restore_tally(tally: Tally, ledger: Ledger, start: StartingPoint, metrics: Path) -> None:
    """After a resume, add what the surviving steps of earlier sessions consumed and scored."""
    tally.is_resumed = start.state.num_lives > 0
    for batch in start.state.batches:
        if batch.step <= start.version:
            tally.add_history([batch.step - 1 - group.first_version for group in batch.groups])
    tally.lengths.restore(ledger.length_facts(), start.state.live)
    tally.sources.restore(ledger.group_fates(), start.state.live)
    for version, values in ledger.evaluations().items():
        if version <= start.version:
            tally.add_evaluation(version, values if tally.layout is None else tally.layout.counted(values))
    for row in rows_of(metrics, "eval"):
        if isinstance(row.get("version"), int) and row["version"] in tally.eval_metrics:
            found = {name: row[name] for name in RED_TEAM_METRICS if name in row}
            tally.eval_metrics[row["version"]].update(found)
    tally.answers.restore(metrics, start.version)
