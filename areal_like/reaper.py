"""`python -m areal_like.reaper`: removes the weights of a run whose controller was killed.

A controller that is killed (kill -9, out of memory) can remove nothing, and neither can its child processes, which exit
with it. The weights would fill shared memory until the next run. This process waits until its standard input, which the
controller holds open, is closed; it then removes the folders of dead owners (store_owner.py) and exits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WAITS_S = (0.0, 0.3, 1.0)
"""Delay before each check: the run's other processes exit shortly after the controller."""
CLOSE_S = 5.0


def start() -> Callable[[], None]:
    """Start a reaper for this process; returns a function that ends it. Raises OSError."""
    installation = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([installation, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "areal_like.reaper"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip

    def end() -> None:
        process.kill()  # the controller has removed everything itself
        with contextlib.suppress(subprocess.TimeoutExpired):  # a busy machine may take longer to end it
            process.wait(CLOSE_S)
        if process.stdin is not None:
            process.stdin.close()

    return end


def main() -> None:
    """Wait, then sweep."""
    while os.read(0, 1 << 10):
        pass
    from areal_like.store_owner import sweep_dead  # imported late: while it waits, it is a bare interpreter

    for wait_s in WAITS_S:
        time.sleep(wait_s)
        sweep_dead()


if __name__ == "__main__":
    main()
