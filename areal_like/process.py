"""Common behaviour of the processes of a run: start from a spec, exit with the parent, and report how they ended.

This covers exit statuses, signals, the parent's exit, compute threads and logging to stderr. Processes are started in
controller/launch.

Exit statuses: 0 success, 2 the user's mistake, 4 the policy has diverged, 1 anything else. Unless it is 0, the last
line on stderr is `error: ...`; for status 1 a traceback precedes it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import psutil

from areal_like.errors import PolicyDiverged, UserError
from areal_like.import_check import append_user_path, check_not_shadowed
from areal_like.plain_text import LineFormatter, printable
from areal_like.secret_values import print_traceback, sealed_for_log, without_secrets

if TYPE_CHECKING:  # these imports would take most of the processor time of short-lived processes
    import asyncio

    from areal_like.config import ProcessSpec, StartSpec

log = logging.getLogger(__name__)

ORDERLY, FAILED, USER_MISTAKE, DIVERGED = 0, 1, 2, 4
"""Exit statuses. USER_MISTAKE: the user must change something. DIVERGED: the policy's numbers are not finite."""
PRIVATE_UMASK = 0o077
EXIT_GRACE_S = 20.0
"""Time that remaining threads may delay the exit; then the process exits without waiting for them."""
PARENT_POLL_S = 1.0
PARENT_WATCH = "parent-watch"
"""Name of the thread that identifies a process of ours."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PR_SET_PDEATHSIG = 1
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_umasks_before: list[int] = []
"""Previous umask of each `private_files` that has been entered, the outermost first."""

AnySpec = TypeVar("AnySpec", bound="StartSpec")
ProcessMain = Callable[["ProcessSpec", "asyncio.Event"], Awaitable[None]]


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files that are created in the body readable by this user only. It applies to the process, not to a
    thread.
    """
    before = os.umask(PRIVATE_UMASK)
    _umasks_before.append(before)
    try:
        yield
    finally:
        _umasks_before.pop()
        os.umask(before)


@contextlib.contextmanager
def user_umask() -> Iterator[None]:
    """Within `private_files`, restore the umask that the command was started with, for folders that do not belong to
    one run."""
    before = os.umask(PRIVATE_UMASK)
    os.umask(_umasks_before[0] if _umasks_before else before)
    try:
        yield
    finally:
        os.umask(before)


def run_process(main: ProcessMain, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main(spec, stop)` to its end and exit. SIGTERM and SIGINT set `stop`; `main` should then end soon.

    `argv` without the program's name (default: sys.argv[1:]) must hold `--spec FILE`.
    """
    import asyncio

    from areal_like.config import ProcessSpec

    run_blocking(ProcessSpec, lambda spec: asyncio.run(until_signalled(lambda stop: main(spec, stop))), argv)


def run_blocking(kind: type[AnySpec], main: Callable[[AnySpec], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main(spec)` to its end and exit, with the logging, the signals and the exit statuses of this module."""
    parser = argparse.ArgumentParser(
        description="One process of a run. The areal-like command starts it; do not start it manually."
    )
    parser.add_argument("--spec", required=True, type=Path, help="JSON file written by the launcher")
    arguments = parser.parse_args(argv)
    os.umask(PRIVATE_UMASK)
    try:
        spec = kind.load(arguments.spec)
        die_with_parent(spec.parent_pid)
        limit_threads(spec.num_threads)
        start_logging(spec.name)
        check_not_shadowed()
        append_user_path()
        main(spec)
        status = ORDERLY
    except BaseException as error:  # the fault boundary of the process
        status = report_end(error)
    sys.exit(status)


async def until_signalled(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stop)` to its end. SIGTERM and SIGINT set `stop`; remaining threads get EXIT_GRACE_S."""
    import asyncio

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        log.info("received signal %d; stopping", number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await main(stop)
    except BaseException as error:
        _leave_within(EXIT_GRACE_S, error)
        raise
    # From here on only remaining threads can delay the exit: asyncio.run waits for executor threads, on 3.11 without
    # limit.
    _leave_within(EXIT_GRACE_S, None)


def freeze_heap() -> None:
    """Exclude all objects that exist now from garbage collection.

    Call it when everything is imported and loaded. It does nothing in a process that is not one of ours (a test, a
    notebook). torch, transformers and a model are several hundred thousand objects; scanning them took 80 ms each time,
    3 % of a rollout worker's and 2.5 % of a trainer's time.
    """
    if any(thread.name == PARENT_WATCH for thread in threading.enumerate()):
        gc.collect()
        gc.freeze()


def trim_heap() -> None:
    """Return freed memory to the operating system."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def report_end(error: BaseException) -> int:
    """Print the error (`error: ...` as the last line, after a traceback if it is needed) and return the exit status."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(f"error: {error.code}", file=sys.stderr, flush=True)
            return FAILED
        return error.code or ORDERLY
    cause = first_cause(error)
    is_plain = isinstance(cause, UserError | PolicyDiverged)
    if not is_plain:
        print_traceback(error)
    text = printable(without_secrets(" ".join(str(cause).split())))
    said = text if is_plain else f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    print(f"error: {sealed_for_log(said)}", file=sys.stderr, flush=True)
    return (DIVERGED if isinstance(cause, PolicyDiverged) else USER_MISTAKE) if is_plain else FAILED


def first_cause(error: BaseException) -> BaseException:
    """The exception to report: in an exception group a user's mistake if there is one, else the first."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if isinstance(leaf, UserError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def start_logging(name: str, level: str = "INFO") -> None:
    """Log to stderr, one line per record; the launcher redirects stderr to the process's log file.

    Processes that only run the user's code call it too, with level WARNING: Python's own handler would print secrets.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"))
    logging.basicConfig(level=os.environ.get("AREAL_LIKE_LOG", level).upper(), handlers=[handler], force=True)


def limit_threads(num_threads: int) -> None:
    """Limit the compute threads of this process, and of libraries and processes that it loads or starts later."""
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(num_threads)


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed by SIGKILL as soon as `parent_pid` exits. Exits at once if it has exited already.

    On Linux the kernel does this if `parent_pid` is the direct parent. The signal is also sent when merely the *thread*
    that started this process ends, so start processes from a thread that stays. On other systems, and for an ancestor
    behind a wrapper, a polling thread does it.
    """
    try:
        parent = psutil.Process(parent_pid)
        started_s = parent.create_time()
    except psutil.NoSuchProcess:
        _follow_parent(parent_pid)
    if os.getppid() == parent_pid:
        die_with_starter(parent_pid)
    watcher = threading.Thread(target=_watch_parent, args=(parent, started_s), name=PARENT_WATCH, daemon=True)
    watcher.start()


def die_with_starter(starter_pid: int) -> None:
    """Have the kernel end this process when `starter_pid`, its direct parent, ends. Linux only; nothing elsewhere.

    No thread is started, so a process may be forked from this one afterwards (it has to call this itself).
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning(
            "prctl failed: %s; the kernel will not end this process when its parent exits",
            os.strerror(ctypes.get_errno()),
        )
    if os.getppid() != starter_pid:  # it exited before the kernel was asked
        _follow_parent(starter_pid)


def command_words(process: psutil.Process) -> list[str]:
    """Arguments of its command line, which a forked process has as one string (forkserver.py). Raises psutil.Error."""
    words = process.cmdline()
    return words[0].split() if words and not any(words[1:]) else words


def is_alive(process: psutil.Process) -> bool:
    """Whether the process is running; False for a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_same_process(pid: int, started_s: float) -> bool:
    """True while the process with `pid` that started at `started_s` (psutil's create_time) is running."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def process_identity(pid: int) -> str:
    """Identifies a process among all that have or had its pid; empty if it has exited or is a zombie.

    On Linux it is the boot id and the clock tick of the start, which unlike a wall-clock time never change while it
    runs.
    """
    if sys.platform != "linux":
        try:
            return f"{psutil.Process(pid).create_time():.2f}"
        except psutil.NoSuchProcess:
            return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else f"{boot_id()} {fields[19]}"


def boot_id() -> str:
    """Id of the machine's current boot: process ids are only valid within it. Empty if the kernel has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _watch_parent(parent: psutil.Process, started_s: float) -> None:
    while is_same_process(parent.pid, started_s):
        time.sleep(PARENT_POLL_S)
    _follow_parent(parent.pid)


def _follow_parent(parent_pid: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):  # stderr may have been closed with the parent
        print(f"error: parent process {parent_pid} has exited, so this process exits too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(FAILED)


def _leave_within(grace_s: float, error: BaseException | None) -> None:
    """Exit after `grace_s` even if some thread never ends, with the exit status for `error`."""

    def leave() -> None:
        time.sleep(grace_s)
        status = ORDERLY
        try:
            log.warning("exiting while these threads are still running: %s", [t.name for t in threading.enumerate()])
            status = report_end(error) if error is not None else ORDERLY
        finally:
            os._exit(status)

    threading.Thread(target=leave, name="exit-deadline", daemon=True).start()


def describe_status(returncode: int) -> str:
    """A return code as text: `status 2`, or the signal that ended the process."""
    if returncode >= 0:
        return f"status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def last_error(tail: str) -> str:
    """Message of the last `error: ...` line of a log; empty if there is none."""
    for line in reversed(tail.splitlines()):
        if line.startswith("error: "):
            return printable(line.removeprefix("error: "))
    return ""
