"""Every rank of the trainer except rank 0: follows the orders of rank 0 until the run ends.

It receives and packs batches in the background of the running step. It does not talk to the
controller, and writes no files but its part of a checkpoint. Rank 0 handles signals, so SIGTERM is ignored here.

Threads: the caller's executes orders and computes (waits for rank 0, until the deadline of trainer.ranks). A second one
receives and packs (waits for rank 0 too, and for a free slot in `_packed`). It ends after the last batch, or with the
process. A third one writes or sends this rank's part of a checkpoint; the next save waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.activity import Activity
from trainer.data.batch import PreparedBatch
from trainer.peer_errors import RankLost
from trainer.ranks import Order
from trainer.training import Saved, Training

log = logging.getLogger(__name__)


class Follower:
    """Drives one Training by the orders of rank 0. Call `run` once."""

    def __init__(self, training: Training, activity: Activity) -> None:
        self._training, self._activity = training, activity
        self._packed: queue.Queue[PreparedBatch | BaseException] = queue.Queue(maxsize=1)
        """A prefetch of one batch, as on rank 0."""
        self._saving_thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[Saved] | None = None

    def run(self) -> None:
        """Run until rank 0 ends the run. Raises RankLost, OperationError, UserError."""
        training = self._training
        with self._activity.state("load"):
            training.open()
        threading.Thread(target=self._receive, name="packing", daemon=True).start()
        while (order := self._next_order()) is not Order.END:
            match order:
                case Order.STEP:
                    prepared = self._next_batch()
                    with self._activity.state("forward_backward", step=prepared.step):
                        training.run(prepared)
                    del prepared
                case Order.PUBLISH:
                    with self._activity.state("publish", version=training.version):
                        training.publish()
                case Order.SAVE:
                    self._end_saving()
                    with self._activity.state("checkpoint", version=training.version):
                        self._saving = self._saving_thread.submit(training.save())
                case Order.EXPORT:
                    with self._activity.state("export"):
                        training.export()
        self._end_saving()
        training.close()

    def _end_saving(self) -> None:
        """Wait until this rank's part of the last checkpoint is written or sent. Raises errors of that."""
        if self._saving is not None:
            limit_s = self._training.settings.rank_timeout_s
            try:
                self._saving.result(limit_s)
            except TimeoutError:
                raise RankLost(f"rank 0 did not receive a part of a checkpoint within {limit_s:g} s") from None
            self._saving = None

    def _next_order(self) -> Order:
        with self._activity.state("wait:batch", step=self._training.version + 1):
            return self._training.ranks.hear()

    def _next_batch(self) -> PreparedBatch:
        """Return the next packed batch. Rank 0 has packed it, so it was sent. Raises errors of receiving."""
        limit_s = self._training.settings.rank_timeout_s
        try:
            found = self._packed.get(timeout=limit_s)
        except queue.Empty:
            raise RankLost(f"rank 0 trains on a batch that this rank did not receive within {limit_s:g} s") from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _receive(self) -> None:
        """Receive batches from rank 0 and put them, packed, into `_packed`; errors as well."""
        training = self._training
        try:
            while (batch := training.ranks.next_batch()) is not None:
                with self._activity.span("packing", "packing", step=batch.step, samples=len(batch.samples)):
                    prepared = training.prepare(batch.samples, batch.step)
                self._packed.put(prepared, timeout=training.settings.max_batch_wait_s)
        except BaseException as error:  # forwarded to the other thread, which raises it
            self._packed.put(error)
