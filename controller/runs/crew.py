"""`areal-like drain RUN WORKER` and `areal-like add RUN`: remove and add rollout workers of a run in progress.

Sends the request to the run's controller and waits. The controller notifies the workers, which may be on other
machines; requests are handled in controller/runtime/worker_admin.py.

Exit status: 0 it is done; 1 it was refused, or is not done within the timeout (and continues); 2 the run is not in
progress.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from areal_like.errors import UserError
from controller.run_folder.formatting import printable, span
from controller.run_folder.owner_host import Whereabouts, whereabouts
from controller.run_folder.run_folder import RunFolder, is_from_files
from controller.runs.facts import read_facts
from controller.runtime.control_requests import Wish, answer_to, ask, withdraw

ANSWER_S = 10.0
"""The controller checks for requests several times a second."""
DEFAULT_TIMEOUT_S = 60.0
POLL_S = 0.1

Clock = Callable[[], float]
Sleep = Callable[[float], None]


def drain(
    folder: RunFolder,
    worker: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> int:
    """Drain a rollout worker: it passes its running samples to other workers and exits. Returns the exit status. Raises
    UserError.
    """
    if _asked(folder, "drain", worker, sleep, clock) is None:
        return 1
    print(f"{folder.name}: {worker} is draining; its running samples move to other workers")
    if not wait_until(lambda: worker not in read_facts(folder, whole=False).processes, timeout_s, sleep, clock):
        return _unfinished(folder, f"{worker} has not left the run within {span(timeout_s)}")
    print(f"{folder.name}: {worker} has left the run")
    return 0


def add(
    folder: RunFolder,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> int:
    """Add a rollout worker to the run; return the exit status. Raises UserError."""
    worker = _asked(folder, "add", "", sleep, clock)
    if worker is None:
        return 1
    print(f"{folder.name}: {worker} starts")

    def has_joined() -> bool:
        return bool(read_facts(folder, whole=False).processes.get(worker, {}).get("incarnation"))

    if not wait_until(has_joined, timeout_s, sleep, clock):
        return _unfinished(folder, f"{worker} has not reported within {span(timeout_s)}")
    print(f"{folder.name}: {worker} has joined the run")
    return 0


def _asked(folder: RunFolder, wish: Wish, worker: str, sleep: Sleep, clock: Clock) -> str | None:
    """The worker named in the controller's answer; None if it refused or did not answer, which is printed."""
    _, key = ask_run(folder, wish, worker, remedy="specify a run that is in progress")
    found: list[tuple[bool, str]] = []

    def is_answered() -> bool:
        if (answer := answer_to(folder.requests, key)) is not None:
            found.append(answer)
        return bool(found)

    try:
        wait_until(is_answered, ANSWER_S, sleep, clock)
    finally:
        withdraw(folder.requests, key)
    is_granted, text = (
        found[0]
        if found
        else (False, f"the run did not reply within {span(ANSWER_S)}, because it is starting or ending")
    )
    if not is_granted:
        say_refused(folder, text)
        return None
    return text


def goes_on(where: Whereabouts) -> bool:
    """Return whether the run has, or may have, a running controller."""
    return where.kind in ("running", "foreign")


def ask_run(folder: RunFolder, wish: Wish, worker: str = "", *, remedy: str) -> tuple[Whereabouts, str]:
    """Write a request for the run's controller; return the run's folder and the request's key. Raises UserError."""
    where = whereabouts(folder)
    if not goes_on(where):
        raise UserError(f"{folder.name} {where.words}", where=str(folder.root), remedy=remedy)
    if is_from_files(where.state):
        advice = (
            "set trainer.checkpoint to choose when the run saves checkpoints"
            if wish == "checkpoint"
            else "use a run with rollouts, because this run has no rollout workers"
        )
        raise UserError("the run trains from files and accepts no requests", where=str(folder.root), remedy=advice)
    return where, ask(folder.requests, wish, worker)


def say_refused(folder: RunFolder, text: str) -> None:
    """Print to standard error why the request was refused."""
    print(f"error: {folder.name}: {printable(text)}", file=sys.stderr)


def wait_until(is_so: Callable[[], bool], timeout_s: float, sleep: Sleep, clock: Clock) -> bool:
    """Poll until the condition holds; False after the timeout."""
    due_s = clock() + timeout_s
    while not is_so():
        if clock() > due_s:
            return False
        sleep(POLL_S)
    return True


def _unfinished(folder: RunFolder, text: str) -> int:
    print(f"error: {text}; see areal-like status {folder.root}", file=sys.stderr)
    return 1
