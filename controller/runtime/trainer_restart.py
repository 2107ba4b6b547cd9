"""Chooses the checkpoint from which a lost trainer restarts (also used by `resume`), and the name of its lineage.

Whether it restarts is decided in supervisor.py; batches are replayed by coordinator.py.

Existing checkpoints are determined from the disk, because a crash may occur between a checkpoint and its report, and
runs may be moved. The disk is read when every rank has exited; otherwise one might still complete a checkpoint. A
thread reads every byte of the checkpoint while the run continues.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.errors import DeadlineExceeded
from controller.coordinator.events import TrainerRestarted
from controller.ledger.ledger import Ledger
from controller.runtime.supervisor import Loss, Supervisor
from controller.wiring.checkpoints import checkpoint_problem, checkpoints_on_disk, repair_checkpoints

log = logging.getLogger(__name__)

GONE_S = 30.0
"""Time limit between the kill of all ranks and their exit."""
GONE_POLL_S = 0.05
READ_S = 1800.0
"""Time limit of finding the newest intact checkpoint, of which every byte is read."""


@dataclass(frozen=True)
class Found:
    """The checkpoint to continue from; `path` None: none, so the initial policy is used. left_out: skipped ones, with
    reasons.
    """

    version: int = 0
    path: Path | None = None
    left_out: list[str] = field(default_factory=list)


def find_checkpoint(run_dir: Path, *, num_batches: int, ledger_seq: int) -> Found:
    """Find the newest intact checkpoint on disk that is recorded in the ledger, which has `num_batches` steps in
    `ledger_seq` facts.

    Reads every byte of it. No trainer of the run may be running: incomplete files of a killed one are removed first.
    """
    repair_checkpoints(run_dir)
    left_out: list[str] = []
    for version, path in reversed(checkpoints_on_disk(run_dir)):
        is_known = version <= num_batches
        problem = checkpoint_problem(path, ledger_seq) if is_known else f"the ledger ends at step {num_batches}"
        if problem is None:
            return Found(version, path, left_out)
        left_out.append(f"checkpoint {path} was skipped: {problem}")
    return Found(left_out=left_out)


class TrainerRestart:
    """Restarts the trainer. Call `begin` for each loss within the restart limit."""

    def __init__(
        self,
        run_dir: Path,
        ledger: Ledger,
        supervisor: Supervisor,
        *,
        num_lineages: int,
        new_address: Callable[[], str],
    ) -> None:
        """num_lineages: number of lineages in the ledger, including the present one. new_address: returns where the
        ranks meet next.
        """
        self._run_dir, self._ledger, self._supervisor = run_dir, ledger, supervisor
        self._num_lineages, self._new_address = num_lineages, new_address

    async def begin(self, loss: Loss) -> tuple[TrainerRestarted, list[str]]:
        """Prepare the restart of the trainer; return the event for the coordinator, and messages on checkpoints that
        cannot be used.

        The caller must pass the event to the coordinator before any other event: it contains the batches recorded now.
        Raises LedgerError, DeadlineExceeded.
        """
        await self._until_all_are_gone()
        num_batches, ledger_seq = len(self._ledger.batches_after(0)), self._ledger.seq
        try:
            async with asyncio.timeout(READ_S):
                found = await _in_thread(
                    lambda: find_checkpoint(self._run_dir, num_batches=num_batches, ledger_seq=ledger_seq)
                )
        except TimeoutError as error:
            raise DeadlineExceeded("the newest complete checkpoint", "the run folder's disk", READ_S) from error
        lineage = f"l{self._num_lineages}"
        self._num_lineages += 1
        changes = {
            "lineage": lineage,
            "resume_from": str(found.path) if found.path is not None else None,
            "is_device_taken": True,
            "ranks_address": self._new_address(),
        }
        self._supervisor.renew(lambda spec: spec.model_copy(update=changes))
        log.info("the trainer was restarted from version %d (new lineage: %s)", found.version, lineage)
        event = TrainerRestarted(
            reason=f"{loss.name}: {loss.reason}",
            lineage=lineage,
            checkpoint_version=found.version,
            batches=self._ledger.batches_after(found.version),
        )
        return event, found.left_out

    async def _until_all_are_gone(self) -> None:
        """Wait until all ranks have exited. A killed rank that the kernel has not released delays its successor, but
        not this wait.
        """
        due_s = time.monotonic() + GONE_S
        while names := self._supervisor.living("trainer"):
            if time.monotonic() > due_s:
                log.warning("these processes were killed %g s ago but are still running: %s", GONE_S, ", ".join(names))
                return
            await asyncio.sleep(GONE_POLL_S)


async def _in_thread(work: Callable[[], Found]) -> Found:
    """Like asyncio.to_thread, but in a daemon thread, so that the end of the run does not wait for it."""
    found: Future[Found] = Future()

    def live() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # fault boundary of this thread: the caller raises the exception
            found.set_exception(error)

    found.set_running_or_notify_cancel()
    threading.Thread(target=live, name="checkpoints", daemon=True).start()
    return await asyncio.wrap_future(found)
