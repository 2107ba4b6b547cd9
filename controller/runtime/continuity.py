"""Checks whether ledger, checkpoints and step metrics of a run are consistent, before the run is continued.

`check_continuity` compares them, raises an error, and moves files if a loss is accepted. The checkpoint is chosen in
trainer_restart.py. Checkpoints are not read completely, and files are not repaired.

When a controller is killed, the files are consistent in this order: a batch is in the ledger before it is trained on,
so neither metrics nor checkpoints are ever ahead of the ledger, and metrics are at most LAG_STEPS behind a checkpoint.
Any other state means that a file was lost, replaced by an older copy, or belongs to another run. Continuing without a
check would train steps a second time, from other samples, and overwrite valid checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from areal_like.errors import UserError
from areal_like.metrics import JsonlLog
from controller.coordinator.snapshot import LedgerState
from controller.ledger.ledger import LEDGER_FILE, SEGMENT_FOLDER, Ledger
from controller.run_folder.run_folder import RunFolder
from controller.wiring.checkpoints import checkpoint_origin, checkpoints_on_disk

log = logging.getLogger(__name__)

LAG_STEPS = 2
"""A checkpoint may be on disk before the controller has written the rows of its last steps."""
LOSS_ROW = "loss_accepted"
"""Kind of the metrics row after which the run is at `step`, independent of earlier rows."""
SET_ASIDE = "set_aside"
"""Folder under checkpoints/ for checkpoints of an abandoned history; it is never read."""
ACCEPT = "--accept-loss"


@dataclass
class Findings:
    """Inconsistencies. `fatal`: the run cannot be continued; `lossy`: only if the loss is accepted."""

    fatal: list[str] = field(default_factory=list)
    lossy: list[str] = field(default_factory=list)
    abandoned: list[Path] = field(default_factory=list)
    """Checkpoints that are not in the ledger's history."""
    is_restart: bool = False
    """Whether unrecorded steps would be sampled again, from the initial policy on."""


def has_progress(folder: RunFolder) -> bool:
    """Whether the run has trained or sampled something, so that its ledger must exist."""
    segments = folder.root / SEGMENT_FOLDER
    return (
        bool(checkpoints_on_disk(folder.root))
        or last_step(folder.metrics) > 0
        or (segments.is_dir() and any(segments.glob("*.seg")))
    )


def refuse_absent_ledger(folder: RunFolder, ledger: Path, *, accept_loss: bool) -> None:
    """Raise UserError if a run that has made progress has no ledger."""
    if ledger.exists() or not has_progress(folder):
        return
    found = Findings(lossy=[f"there is no {LEDGER_FILE}"])
    if checkpoints_on_disk(folder.root):
        found.fatal.append("there are checkpoints, but a run cannot be resumed from them without the ledger")
    if found.fatal or not accept_loss:
        refuse(folder, found)


def check_continuity(
    folder: RunFolder,
    ledger: Ledger,
    run_id: str,
    *,
    accept_loss: bool,
    is_mirror: bool,
    say: Callable[[str], None],
) -> None:
    """Raise UserError if the run's files are inconsistent; with `accept_loss` only if no consistent state is left.

    `is_mirror`: the ledger is a copy that may be older than the run. Missing facts are accepted, unless unrecorded
    steps would be sampled again from the initial policy on. An accepted loss is recorded in metrics.jsonl, and
    checkpoints of the abandoned history are moved aside.
    """
    state = ledger.load()
    steps = len(state.batches)
    found = _compare(folder, ledger, state, run_id)
    is_accepted = accept_loss or (is_mirror and not found.is_restart)
    if found.fatal or (found.lossy and not is_accepted):
        refuse(folder, found)
    if not found.lossy:
        return
    for words in found.lossy:
        say(f"accepted: {words}")
    for path in found.abandoned:
        target = folder.checkpoints / SET_ASIDE / f"{path.name}.{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        say(f"checkpoint {path.name} was moved to {target}")
    metrics = JsonlLog(folder.metrics)
    metrics.append({"kind": LOSS_ROW, "time_s": time.time(), "step": steps, "text": "; ".join(found.lossy)})
    metrics.close()


def refuse(folder: RunFolder, found: Findings) -> None:
    """Raise UserError with the inconsistencies, and how to continue."""
    export = f"areal-like export {folder.root} MODEL_FOLDER"
    ways = [f"restore {LEDGER_FILE} (with its {LEDGER_FILE}-wal, if any), metrics.jsonl and checkpoints/ from a backup"]
    if not found.fatal:
        command = f"areal-like resume {ACCEPT} {folder.root}"
        ways.append(f"or continue from the newest state that is in both the ledger and the checkpoints ({command})")
    ways.append(f"or start a new run from a checkpoint ({export}, then model.path=MODEL_FOLDER)")
    raise UserError(
        "the files of this run are inconsistent: " + "; ".join([*found.fatal, *found.lossy]),
        where=str(folder.root),
        remedy=", ".join(ways),
    )


def _compare(folder: RunFolder, ledger: Ledger, state: LedgerState, run_id: str) -> Findings:
    found, steps, seq = Findings(), len(state.batches), ledger.seq
    if ledger.run_id not in ("", run_id):
        found.fatal.append(f"{LEDGER_FILE} belongs to run {ledger.run_id}, but state.json belongs to run {run_id}")
    trained = last_step(folder.metrics)
    if trained > steps:
        found.lossy.append(f"metrics.jsonl has step {trained}, but {LEDGER_FILE} ends at step {steps}")
    lineages, covered, ahead = ledger.lineages(), [], []
    for version, path in checkpoints_on_disk(folder.root):
        origin = checkpoint_origin(path)
        if origin is None:
            continue  # damaged: find_checkpoint skips it with a message
        owner, lineage, ledger_seq = origin
        if owner not in ("", run_id):
            found.fatal.append(f"checkpoint {path} belongs to run {owner}, not to {run_id}")
        elif why := _abandoned(version, lineage, ledger_seq, steps=steps, seq=seq, lineages=lineages):
            found.abandoned.append(path)
            found.lossy.append(f"checkpoint {path.name} {why}")
            ahead += [version] if lineage in lineages else []
        else:
            covered.append(version)
    newest = max([*covered, *(checkpoint.version for checkpoint in state.checkpoints)], default=0)
    if trained < newest - LAG_STEPS:
        found.lossy.append(f"checkpoint {newest} is recorded, but metrics.jsonl ends at step {trained}")
    if found.abandoned and not covered:
        # A run on a cluster may end between its first checkpoint and the next copy of the ledger.
        is_first = len(checkpoints_on_disk(folder.root)) == len(ahead) == 1 and not state.checkpoints
        if is_first:
            found.lossy.append(
                f"{LEDGER_FILE} ends before the first checkpoint, so training would start again from the first step"
            )
            found.is_restart = ahead[0] > steps
        else:
            found.fatal.append("no checkpoint matches the ledger")
    if not seq and has_progress(folder):
        found.lossy.append(f"{LEDGER_FILE} is empty")
    if state.checkpoints and not checkpoints_on_disk(folder.root):
        found.lossy.append(
            f"{LEDGER_FILE} records checkpoints up to version {newest}, but checkpoints/ contains none, so all steps "
            "would be trained again from the initial policy"
        )
    return found


def _abandoned(
    version: int, lineage: str, ledger_seq: int, *, steps: int, seq: int, lineages: Mapping[str, int]
) -> str:
    """Why this checkpoint is not in the ledger's history; empty if it is."""
    if version > steps:
        return f"is of step {version}, but {LEDGER_FILE} ends at step {steps}"
    if ledger_seq > seq:
        return f"was written when the ledger contained {ledger_seq} facts, but the ledger contains only {seq}"
    if lineage not in lineages:
        return f"is of lineage {lineage}, which is not in {LEDGER_FILE}"
    return ""


def last_step(metrics: Path) -> int:
    """The highest step that metrics.jsonl has a row of, since a loss was last accepted; 0 where there is none."""
    marks = (b'"kind":"step"', b'"kind":"' + LOSS_ROW.encode() + b'"')
    newest = 0
    try:
        with metrics.open("rb") as lines:
            for line in lines:
                if any(mark in line for mark in marks):
                    newest = _step_of(line, newest)
    except FileNotFoundError:
        return 0
    return newest


def _step_of(line: bytes, newest: int) -> int:
    try:
        row = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):  # truncated by a crash
        return newest
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return newest
    return step if row.get("kind") == LOSS_ROW else max(newest, step)
