"""`python -m trainer.offline --spec FILE`: one run from files, in its own process.

SIGTERM ends it after the current step, with a checkpoint. With several ranks, rank 0 receives signals and the others
follow it.
"""

from __future__ import annotations

import signal
import threading

from areal_like import quick_exit
from areal_like.process import run_blocking
from trainer.offline.loop import OfflineTraining
from trainer.offline.spec import OfflineSpec
from trainer.ranks import leave_at_once


def train(spec: OfflineSpec) -> None:
    """Execute the run. Raises UserError, OperationError."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if spec.rank else lambda *_: stop.set())
    training = OfflineTraining(spec, stop.is_set)
    try:
        training.run()
    except BaseException as error:
        if training.ranks is not None and training.ranks.has_group:
            leave_at_once(error)
        raise


if __name__ == "__main__":
    quick_exit.run(lambda: run_blocking(OfflineSpec, train))
