"""`python -m trainer.offline --spec FILE`: one run from files, in its own process.

SIGTERM ends it after the current step, with a checkpoint.
"""

from __future__ import annotations

import signal
import threading

from areal_like.process import run_blocking
from trainer.offline.loop import OfflineTraining
from trainer.offline.spec import OfflineSpec


def train(spec: OfflineSpec) -> None:
    """Execute the run. Raises UserError, OperationError."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    OfflineTraining(spec, stop.is_set).run()


if __name__ == "__main__":
    run_blocking(OfflineSpec, train)
