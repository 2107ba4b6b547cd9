"""`areal-like verify`: recounts the invariants of a run and compares everything that is stored with its digests.

Read-only, from ledger, segment files, checkpoints and exported models. The parts are in audit.py of the ledger,
chain.py, run_files.py, weights.py and spot_check.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.errors import UserError
from controller.ledger.audit import AuditReport, audit
from controller.ledger.read_only import open_ledger
from controller.run_folder.owner_host import whereabouts_if_known
from controller.run_folder.run_folder import NO_LEDGER, RunFolder
from controller.run_folder.seal import SEAL_FILE
from controller.runs.verify.chain import Chain, check_chain
from controller.runs.verify.damaged import DAMAGED
from controller.runs.verify.invariants import CHAIN
from controller.runs.verify.run_files import IN_PROGRESS, check_files
from controller.runs.verify.weights import Weights, check_checkpoint, check_export, check_weights


@dataclass
class Verified:
    """Result. `findings`: one line each, the first broken link of the chain first; empty if everything holds."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    """What was compared, one line each."""
    policy_digest: str = ""
    """Digest of everything that the newest version was trained on; empty if there is none."""
    last_digest: str = ""
    """Digest of the newest fact."""


def verify(
    folder: RunFolder, *, invariant: str | None = None, export: Path | None = None, checkpoint: Path | None = None
) -> Verified:
    """Verify a run, or one of its exported models or checkpoints with it.

    Args:
        folder: the run.
        invariant: check only this one of INVARIANTS.
        export: an exported model of the run that is checked as well.
        checkpoint: a checkpoint of the run that is checked as well, such as a copy stored elsewhere.

    Raises:
        UserError: the run has no ledger.
    """
    if not folder.ledger.is_file():
        raise UserError(
            NO_LEDGER,
            where=str(folder.root),
            remedy="specify a run that was started with `areal-like train`",
        )  # fmt: skip
    found = Verified()
    if invariant in (None, CHAIN):
        _verify_chain(folder, export, checkpoint, found)
    if invariant != CHAIN:
        _recount(folder, invariant, found)
    return found


def _verify_chain(folder: RunFolder, export: Path | None, checkpoint: Path | None, found: Verified) -> None:
    where, had_seal = whereabouts_if_known(folder), (folder.root / SEAL_FILE).exists()
    is_unknown = where.kind == "foreign" and not where.state  # its state file is damaged
    status = "crashed" if is_unknown else where.kind
    chain, weights, others = Chain(), Weights(), _Lines()
    with contextlib.ExitStack() as stack, others.part(folder.ledger):
        db, is_whole = open_ledger(folder)
        stack.enter_context(contextlib.closing(db))
        if not is_whole:
            others.notes.append("the folder is not writable, so the newest facts may be missing")
        db.execute("BEGIN")  # one consistent view, also of a run in progress
        damages = [words for (words,) in db.execute("PRAGMA integrity_check(5)") if words != "ok"]
        others.breaks += [f"{folder.ledger}: {words}" for words in damages]
        check_chain(db, folder.root, chain, may_change=status in IN_PROGRESS)
        (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        with others.part(folder.checkpoints):
            check_weights(folder, chain, str(run_id), status, weights)
        with others.part(export or checkpoint or folder.root):
            _check_named(folder, export, checkpoint, chain, str(run_id), status, weights)
        check_files(db, folder, chain.last_digest, status, others.breaks, others.notes, had_seal=had_seal)
        if where.state.get("run_id") not in (None, run_id):
            others.breaks.append(
                f"{folder.state}: the run id {where.state['run_id']} differs from the run id of the ledger, {run_id}"
            )
    found.findings += [f"{CHAIN}: {line}" for line in (*chain.breaks, *weights.breaks, *others.breaks)]
    found.notes += [*chain.notes, *weights.notes, *others.notes]
    found.last_digest = chain.last_digest
    found.policy_digest = chain.policy_digests.get(max(chain.policy_digests, default=0), "")
    found.counts.append(
        f"compared with their digests: {chain.num_facts:,} facts, the tokens of {chain.num_payloads:,} samples "
        f"({chain.num_purged:,} removed), {weights.num_checkpoints} checkpoints, {weights.num_exports} exported models"
    )


class _Lines:
    """What was found outside of chain and weights: one line each."""

    def __init__(self) -> None:
        self.breaks: list[str] = []
        self.notes: list[str] = []

    @contextlib.contextmanager
    def part(self, path: Path) -> Iterator[None]:
        """Turn an error of this part into a line that names `path`; what was found before it remains."""
        try:
            yield
        except DAMAGED as error:
            self.breaks.append(f"{path} cannot be read ({error or type(error).__name__})")


def _check_named(
    folder: RunFolder, export: Path | None, checkpoint: Path | None, chain: Chain, run_id: str, status: str,
    weights: Weights,
) -> None:  # fmt: skip
    """Check the folder that was named, unless it was checked as a part of the run."""
    if export is not None and export != folder.final:
        check_export(folder, export, chain, run_id, weights, is_last=False)
    if checkpoint is not None and checkpoint not in weights.checked:
        check_checkpoint(checkpoint, chain, run_id, status, weights)


def _recount(folder: RunFolder, invariant: str | None, found: Verified) -> None:
    try:
        report: AuditReport = audit(folder.root)
    except DAMAGED as error:
        found.findings.append(f"{invariant or 'exactly-once'}: the ledger cannot be recounted ({error})")
        return
    found.findings += [line for line in report.findings if invariant is None or line.startswith(f"{invariant}:")]
    found.counts.append(report.lines()[0])
