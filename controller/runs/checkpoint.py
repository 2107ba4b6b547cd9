"""`areal-like checkpoint RUN`: requests a checkpoint of a run in progress and waits for it.

The trainer writes the checkpoint after its current step.

Exit status: 0 it is on disk; 1 it was refused, could not be written, or is not there after the timeout; 2 the run is
not in progress.
"""

from __future__ import annotations

import time

from controller.run_folder.formatting import printable, span
from controller.run_folder.owner_host import whereabouts
from controller.run_folder.run_folder import RunFolder
from controller.runs.crew import ANSWER_S, Clock, Sleep, ask_run, goes_on, say_refused, wait_until
from controller.runtime.control_requests import answer_to, is_taken, withdraw

DEFAULT_TIMEOUT_S = 600.0
"""A step may take minutes, and the checkpoint is written after it."""


def checkpoint(
    folder: RunFolder,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> int:
    """Request a checkpoint and wait for it; return the exit status. Raises UserError if the run is not in progress."""
    where, key = ask_run(
        folder, "checkpoint", remedy="specify a run that is in progress; only such a run can save a checkpoint"
    )
    try:
        if not wait_until(lambda: is_taken(folder.requests, key), ANSWER_S, sleep, clock):
            return _failed(folder, _why_silent(where.kind, where.words))
        return _await(folder, key, timeout_s, sleep, clock)
    finally:
        withdraw(folder.requests, key)


def _await(folder: RunFolder, key: str, timeout_s: float, sleep: Sleep, clock: Clock) -> int:
    found: list[tuple[bool, str]] = []
    ended: list[str] = []

    def is_settled() -> bool:
        if (answer := answer_to(folder.requests, key)) is not None:
            found.append(answer)
        elif not goes_on(whereabouts(folder)):
            ended.append("the run ended before the checkpoint was complete")
        return bool(found or ended)

    wait_until(is_settled, timeout_s, sleep, clock)
    if not found:
        late = f"no checkpoint was saved within {span(timeout_s)}; it will still be saved after the current step"
        return _failed(folder, ended[0] if ended else late)
    is_granted, text = found[0]
    if not is_granted:
        return _failed(folder, text)
    print(f"{folder.name}: {printable(text)}")
    return 0


def _why_silent(kind: str, words: str) -> str:
    if kind == "foreign":
        return f"the run did not reply within {span(ANSWER_S)}: it {words}"
    return f"the run did not reply within {span(ANSWER_S)}, because it is starting or ending"


def _failed(folder: RunFolder, text: str) -> int:
    say_refused(folder, text)
    return 1
