"""Guard process of a run submitted as a Ray job, which allows the run to shut down gracefully after `ray job stop`.

The handling of a stop is in signals.py and server.py.

`ray job stop` sends SIGTERM to a job's entrypoint and all its descendants, and SIGKILL three seconds later (or after
RAY_JOB_STOP_WAIT_TIME_S), which is not enough for a step and a checkpoint. So the entrypoint is a guard, and the
controller is not its descendant. The guard forwards stop signals and exits with the controller's exit status. If the
guard is killed, its controller finishes the current step, saves and releases all resources.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

STOP = b"s"
STOPS = (signal.SIGTERM, signal.SIGINT)
UNKNOWN = 1
"""Exit status if the controller reported none because it was killed."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the entrypoint of a submitted job."""
GUARDED = ("train", "resume", "eval")


def is_needed(command: Sequence[str]) -> bool:
    """Return whether this process is the entrypoint of a submitted Ray job, and the command, if given, starts a run."""
    return JOB_VARIABLE in os.environ and set(command) <= set(GUARDED) and bool(command)


def guard(work: Callable[[], int]) -> int:
    """Run `work()` in a process that survives this one, forward SIGTERM and SIGINT to it, and return its exit status.

    Must be called before threads are started.
    """
    status_out, status_in = os.pipe()
    word_out, word_in = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # a stop signal received now stays pending until it can be forwarded
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    between = os.fork()
    if between == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(status_out)
        os.close(word_in)
        _work(work, status_in, word_out)
    os.close(status_in)
    os.close(word_out)
    os.waitpid(between, 0)
    for number in STOPS:
        signal.signal(number, lambda *_: os.write(word_in, STOP))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    byte = os.read(status_out, 1)  # a signal only interrupts it to run its handler
    return byte[0] if byte else UNKNOWN


def _work(work: Callable[[], int], status_in: int, word_out: int) -> None:
    """Run the controller in the child process; never returns."""
    threading.Thread(target=_hear, args=(word_out,), name="job-guard", daemon=True).start()
    status = UNKNOWN
    try:
        status = work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else UNKNOWN
    except BaseException:  # fault boundary of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.write(status_in, bytes([status & 0xFF]))
        finally:
            os._exit(status)


def _hear(word_out: int) -> None:
    """Raise a stop for each message of the guard, and one when the guard is killed, unless it had forwarded a stop."""
    has_stopped = False
    while word := os.read(word_out, 1):
        has_stopped = True
        if word == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
    if not has_stopped:
        os.kill(os.getpid(), signal.SIGTERM)
