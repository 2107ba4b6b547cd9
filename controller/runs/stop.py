"""`areal-like stop RUN`: sends a signal to the controller of a run, waits, and prints how the run ended.

A signal is sent only to the process that the run's state file names (same pid and start time, held by a pidfd before it
is checked) and that holds the run's lock: a state file can be edited or copied, a lock cannot. Processes of a run
without a controller are not signalled; they exit by themselves.

One SIGTERM: finish the current step, save, exit. --now sends a second one: exit immediately; `resume` continues from
the last checkpoint and every sample in the ledger.
Exit status: 0 it stopped, or was not running; 1 it still runs after the timeout, or ended as failed; 3 it runs on
another machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from areal_like.errors import UserError
from areal_like.process import is_same_process
from controller.ledger.run_lock import lock_holder
from controller.run_folder.formatting import printable, span
from controller.run_folder.owner_host import Whereabouts, status_exit, whereabouts
from controller.run_folder.run_folder import RunFolder, is_resumable
from controller.runs.facts import read_facts

DEFAULT_TIMEOUT_S = 180.0
POLL_S = 0.2
SECOND_SIGNAL_S = 0.2
"""Delay between two signals: a signal that arrives while the same signal is pending is lost."""

Send = Callable[[signal.Signals], None]


def stop(
    folder: RunFolder,
    *,
    now: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Stop a run; return the exit status. Raises UserError (process of another user)."""
    where = whereabouts(folder)
    if not where.is_running:
        return _nothing_to_do(folder, where)
    with _hold(folder, where) as send:
        if send is None:
            return _nothing_to_do(folder, whereabouts(folder))
        send(signal.SIGTERM)
        if now:
            print(f"{folder.name}: stopping immediately")
            sleep(SECOND_SIGNAL_S)
            if whereabouts(folder).is_running:
                send(signal.SIGTERM)
        else:
            print(
                f"{folder.name}: finishing the current step and saving a checkpoint (to stop immediately: areal-like "
                "stop --now)"
            )
        try:
            return _wait(folder, where, clock() + timeout_s, timeout_s, sleep, clock)
        except KeyboardInterrupt:
            print(f"{folder.name} is still shutting down; see areal-like status {folder.root}", file=sys.stderr)
            raise


def _nothing_to_do(folder: RunFolder, where: Whereabouts) -> int:
    if where.kind == "foreign":
        host = where.state.get("host") or "that machine"
        print(
            f"error: {folder.name} {where.words}; it can only be stopped on that machine; log in to {host} and run the "
            "command there",
            file=sys.stderr,
        )
        return status_exit(where.kind)
    print(f"{folder.name}: there is nothing to stop, because the run {where.words}")
    return 0


def _wait(
    folder: RunFolder,
    before: Whereabouts,
    due_s: float,
    timeout_s: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> int:
    """Wait until the process has exited; print what it waits for when that changes."""
    assert before.pid is not None
    printed = ""
    while is_same_process(before.pid, float(before.state["controller_started_s"])):
        words = _ending(folder)
        if words and words != printed:
            print(f"  {words}")
            printed = words
        if clock() > due_s:
            print(
                f"error: {folder.name} is still shutting down after {span(timeout_s)} (process {before.pid}). To stop "
                f"it immediately: areal-like stop --now {folder.root}",
                file=sys.stderr,
            )
            return 1
        sleep(POLL_S)
    after = whereabouts(folder)
    if after.state.get("run_id") == before.state.get("run_id") and after.is_running:
        print(f"{folder.name}: the run ended and was resumed in the meantime ({after.words})")
        return 0
    print(f"{folder.name}: {after.words}")
    if after.kind != "finished" and is_resumable(after.state):
        print(f"  continue with: areal-like resume {folder.root}")
    return status_exit(after.kind)


def _ending(folder: RunFolder) -> str:
    """What the run is waiting for while it shuts down."""
    with contextlib.suppress(UserError):
        waits = read_facts(folder, whole=False).status.get("waits") or ()
        return next((printable(str(wait)) for wait in waits if "run ends" in str(wait)), "")
    return ""


@contextlib.contextmanager
def _hold(folder: RunFolder, where: Whereabouts) -> Iterator[Send | None]:
    """Open a pidfd of exactly this process, so that its pid cannot be reused meanwhile; None if it has exited."""
    pid, started_s = where.pid, float(where.state["controller_started_s"])
    assert pid is not None
    handle = None
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            yield None
            return
        except OSError:
            handle = None  # an old kernel, or a sandbox without the system call: only the check below applies
    try:
        if not is_same_process(pid, started_s):
            yield None
            return
        if lock_holder(folder.root) != pid:
            raise UserError(
                f"state.json records process {pid}, but this process does not have the run open, so no signal was sent",
                where=str(folder.root),
                remedy="if the run has just been started, try again in a moment; if this folder is a copy of a "
                "run, stop the original run",
            )

        def send(number: signal.Signals) -> None:
            try:
                if handle is not None:
                    signal.pidfd_send_signal(handle, number)
                elif is_same_process(pid, started_s):
                    os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has exited; the wait detects it
            except PermissionError as error:
                raise UserError(
                    "the process belongs to another user",
                    where=f"process {pid}",
                    remedy="ask the owner to stop the run",
                ) from error

        yield send
    finally:
        if handle is not None:
            os.close(handle)
