"""The end of a session after its processes have exited: counts, trace, audit, summary, report, exit status.

How a run ends is decided in server.py; summary and report are in telemetry/ and report/.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from areal_like.errors import LedgerError, OperationError, ProcessDied, UserError
from areal_like.external.records import FOLDER as EXTERNAL
from areal_like.external.records import totals_of
from areal_like.plain_text import printable
from areal_like.trace import merge_traces
from controller.coordinator.coordinator import Coordinator
from controller.ledger.audit import audit
from controller.report.at_end import draw_report
from controller.report.shares import summary_shares
from controller.run_folder.run_folder import RunFolder, Status
from controller.run_folder.seal import SEAL_FILE, write_seal
from controller.runtime.open_session import OpenSession
from controller.runtime.outcome import Outcome
from controller.runtime.starting_point import StartingPoint
from controller.telemetry.screen import Screen
from controller.telemetry.summary import fates, write_summary
from controller.telemetry.summary_page import next_steps, print_summary

log = logging.getLogger(__name__)

EXIT_STATUS: Mapping[str, int] = {"completed": 0, "exhausted": 0, "stopped": 0, "failed": 1}
RUN_STATUS: Mapping[str, Status] = {
    "completed": "finished",
    "exhausted": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


@dataclass(frozen=True)
class SessionResult:
    """How a session ended, with its counts if the server was started."""

    outcome: Outcome
    counts: Mapping[str, Any] = field(default_factory=dict)
    prepare_s: float = 0.0
    """Duration of the preparation of the starting model."""


def count_run(session: OpenSession, coordinator: Coordinator, start: StartingPoint) -> dict[str, Any]:
    """Add groups and samples by fate, sessions and restarts, from the coordinator and the ledger."""
    state, emulation = session.ledger.load(), session.config.emulation
    version = max(coordinator.version, start.version)
    counts = fates(coordinator.counts(), state.batches, group_size=session.config.group_size, version=version)
    labels = {"emulated": emulation.words} if emulation else {}
    goals = {"num_steps": session.config.num_steps, "staleness_bound": session.config.staleness.bound}
    return {
        **counts, **({} if session.is_evaluation else goals),
        "lives": state.num_lives, "trainer_restarts": state.num_trainer_restarts, **labels,
    }  # fmt: skip


def conclude(session: OpenSession, result: SessionResult, wall_s: float) -> int:
    """Write summary, trace and audit and print how the run ended; return the exit status, or raise the error that ended
    it.

    Its processes have exited, and the ledger is closed.
    """
    folder, console = session.folder, Screen()
    outcome = result.outcome
    if session.is_evaluation and outcome.status == "completed" and not session.telemetry.tally.accuracy:
        outcome = Outcome("failed", f"no answer was scored; see {folder.logs}")
        session.telemetry.status.end("failed")
        folder.write_state("failed", reason=outcome.reason)
    if session.config.metrics.trace:
        merge_traces(folder.root)
    if result.counts:
        _summarize(session, result, outcome, wall_s, console)
    if not session.is_evaluation:
        _seal(session)
    _print_ending(folder, outcome, console)
    return EXIT_STATUS[outcome.status]


def _summarize(session: OpenSession, result: SessionResult, outcome: Outcome, wall_s: float, console: Console) -> None:
    """Write and print the summary; draw the report."""
    folder, tally, counts = session.folder, session.telemetry.tally, dict(result.counts)
    if not session.is_evaluation:
        counts["audit"] = _audit_words(folder)
    if sinks := session.telemetry.sinks.counts():
        counts["sinks"] = sinks
    summary = tally.summary(counts, status=outcome.status, wall_s=wall_s, prepare_s=result.prepare_s)
    if not session.is_evaluation:
        summary |= summary_shares(folder, summary)
    if external := {name: sums.as_dict() for name, sums in totals_of(folder.root / EXTERNAL).items()}:
        summary["external"] = external
    write_summary(folder.summary, summary)
    for problem in session.telemetry.sinks.end(summary):
        console.print(problem)
    if outcome.status == "failed" and not tally.steps and not tally.accuracy:
        return  # a summary of zeros would hide the error
    print_summary(summary, folder.root, console)
    if session.config.metrics.report and not session.is_evaluation and not session.end.is_hurried:
        if session.config.encryption is None:
            console.print(draw_report(folder.root))
        else:
            again = f"areal-like report {folder.root} --out FOLDER"
            console.print(f"no report was written, because the run is encrypted; to write one: {again}")
    if EXIT_STATUS[outcome.status] == 0 and outcome.error is None and not session.is_evaluation:
        console.print()
        for line in next_steps(summary, folder.root, folder.config):
            console.print(line)


def _seal(session: OpenSession) -> None:
    try:
        write_seal(session.folder, run_id=session.run_id, last_digest=session.ledger.last_digest.hex())
    except OSError as error:
        log.warning("%s/%s could not be written: %s", session.folder.root, SEAL_FILE, error)


def _print_ending(folder: RunFolder, outcome: Outcome, console: Console) -> None:
    """Print how the run ended and how to continue it. Raises the error that ended it."""
    error = outcome.error or (OperationError(outcome.reason) if outcome.status == "failed" else None)
    if outcome.status == "stopped" and error is None:
        console.print(f"the run was stopped ({outcome.reason}); continue with: areal-like resume {folder.root}")
    elif outcome.status != "completed" and outcome.reason != str(error):
        console.print(outcome.reason)
    if isinstance(error, ProcessDied):
        console.print(f"--- last lines of {folder.logs / (error.name + '.log')}")
        console.print(printable(error.tail))
    if error is not None:
        raise error


def _audit_words(folder: RunFolder) -> str:
    try:
        report = audit(folder.root)
    except (UserError, LedgerError) as error:
        return f"not possible: {error}"
    return "clean" if not report.findings else "; ".join(str(finding) for finding in report.findings[:5])
