"""A run that was submitted as a Ray job outlives the few seconds that `ray job stop` gives it.

Owns: the process between Ray and the controller. Refuses: what a stop means (signals.py, server.py).

`ray job stop` sends SIGTERM to a job's entrypoint and all its descendants, and SIGKILL three seconds later (unless
RAY_JOB_STOP_WAIT_TIME_S says otherwise): too early for a running step and a checkpoint. So the entrypoint is a guard,
and the controller no descendant of it. The guard passes stops on and ends with the controller's exit status. When it is
killed, its controller finishes the running step, saves and gives everything back.
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
"""Exit status when the controller said none: it was killed."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the entrypoint of a submitted job."""
GUARDED = ("train", "resume", "eval")


def is_needed(command: Sequence[str]) -> bool:
    """We are the entrypoint of a submitted Ray job, and the command, if any, starts a run."""
    return JOB_VARIABLE in os.environ and set(command) <= set(GUARDED) and bool(command)


def guard(work: Callable[[], int]) -> int:
    """Run `work()` in a process that survives ours, pass SIGTERM and SIGINT on to it; its exit status.

    Call it before there are threads.
    """
    status_out, status_in = os.pipe()
    word_out, word_in = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # a stop that comes now waits until we can pass it on
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
    byte = os.read(status_out, 1)  # a signal interrupts it for its handler only
    return byte[0] if byte else UNKNOWN


def _work(work: Callable[[], int], status_in: int, word_out: int) -> None:
    """The controller's process: never returns."""
    threading.Thread(target=_hear, args=(word_out,), name="job-guard", daemon=True).start()
    status = UNKNOWN
    try:
        status = work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else UNKNOWN
    except BaseException:  # the fault boundary of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.write(status_in, bytes([status & 0xFF]))
        finally:
            os._exit(status)


def _hear(word_out: int) -> None:
    """A stop for each word of the guard; one for its death, unless it had passed a stop on."""
    has_stopped = False
    while word := os.read(word_out, 1):
        has_stopped = True
        if word == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
    if not has_stopped:
        os.kill(os.getpid(), signal.SIGTERM)
