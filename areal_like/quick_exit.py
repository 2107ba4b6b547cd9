"""Runs the program of a process and exits without destroying its objects.

At its end the interpreter destroys every module and object. A process that has imported torch needs 0.4 seconds of
processor time for it, and a forked process also copies the memory pages that it shares with its parent. The kernel
frees the same memory at once.

Everything else happens as at the end of any program: threads that are not daemons are joined, functions registered
with `atexit` are called, files are flushed, and the exit status is the same. Not called are the `__del__` methods of
objects that still exist, as Python's documentation allows, and functions registered with C's `atexit`: a temporary file
that is not closed stays, and a compressed file that is not closed lacks its end. Files that were opened before
`gc.freeze` are not found; the standard streams are flushed in any case.

Standard library only: agents' own interpreters load this file by its path.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

FLUSH_FAILED = 120
"""Exit status of the interpreter where standard output cannot be flushed."""
FLUSH_S = 2.0
"""Time limit for files that the program has left open."""
WRITABLE = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def run(program: Callable[[], object]) -> NoReturn:
    """Call `program`, and exit with the status that the interpreter would have after it."""
    is_interrupted = False
    try:
        program()
        status = 0
    except SystemExit as error:
        status = _status(error)
    except BaseException as error:  # what the interpreter does with it
        sys.excepthook(type(error), error, error.__traceback__)
        is_interrupted, status = isinstance(error, KeyboardInterrupt), 1
    exit_with(status, is_interrupted=is_interrupted)


def exit_with(status: int, *, is_interrupted: bool = False) -> NoReturn:
    """Exit this process. is_interrupted: by SIGINT instead of with `status`."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as processes of `multiprocessing` do
        atexit._run_exitfuncs()
    finally:
        try:
            if not _flush() and status == 0:
                status = FLUSH_FAILED
            if is_interrupted:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            os._exit(status)


def _status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _flush() -> bool:
    """Flush the files that are still open. Returns whether standard output was flushed."""
    # A thread that is blocked in a write holds the lock of its file.
    others = threading.Thread(target=_flush_others, daemon=True)
    others.start()
    others.join(FLUSH_S)
    _flush_one(sys.stderr)
    is_flushed = _flush_one(sys.stdout)
    for stream in (sys.__stdout__, sys.__stderr__):  # a program may have replaced them
        _flush_one(stream)
    return is_flushed


def _flush_others() -> None:
    standard = [id(stream) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)]
    for file in gc.get_objects():
        # isinstance would run code of proxy objects.
        if issubclass(type(file), WRITABLE) and id(file) not in standard:
            _flush_one(file)


def _flush_one(file: Any) -> bool:
    """Flush a file of any type. Returns whether it was possible."""
    try:
        if file is not None and not getattr(file, "closed", False):
            file.flush()
    except Exception:  # of a stream that the program has put in place of a standard one
        return False
    return True
