"""Passes rows from the standard input to an experiment tracker: the loop of the modules `*_process`.

Input: one JSON object per line, first {"start": {...}}, then {"row": {...}} or {"table": {...}}. Output: {"done": n}
for the n-th line, or {"error": "..."}. The process ends when its input does, at most FINISH_S later. The modules import
the trackers' packages; tracker_sink.py starts the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Protocol

from areal_like.errors import first_line

FINISH_S = 60.0


class Tracker(Protocol):
    """One run of a tracker."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Log numbers, which include one of `step`, `version` and `wall_s`, and `_timestamp`, the wall-clock time."""
        ...

    def table(self, table: Mapping[str, Any]) -> None:
        """Log a table (see answers_table.py)."""
        ...

    def finish(self) -> None:
        """End the run: nothing follows."""
        ...


def run_process(begin: Callable[[dict[str, Any]], Tracker]) -> None:
    """Serve the standard input, then end the process within FINISH_S, even if the tracker's package does not finish."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a package prints goes to the log: only answers may reach the sink
        serve(sys.stdin, answers, begin, before_finish=_start_exit_deadline)


def serve(
    lines: IO[str],
    answers: IO[str],
    begin: Callable[[dict[str, Any]], Tracker],
    before_finish: Callable[[], None] = lambda: None,
) -> None:
    """Process lines until there are no more. before_finish: called before the tracker's run is finished."""
    run: Tracker | None = None
    for number, line in enumerate(lines, start=1):
        message = json.loads(line)
        try:
            if "start" in message:
                run = begin(message["start"])
            elif run is not None and "table" in message:
                run.table(message["table"])
            elif run is not None:
                run.log(message["row"])
        except Exception as error:  # a third-party library; the sink counts the row as lost
            answer: dict[str, Any] = {"error": f"{type(error).__name__}: {first_line(error)}"}
            is_over = run is None  # the run could not be started
        else:
            answer, is_over = {"done": number}, False
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if is_over:
            return
    before_finish()
    if run is not None:
        run.finish()


def place_of(row: Mapping[str, Any]) -> int:
    """The position of a row on its axis as an integer: its step, version or second."""
    return int(next(row[axis] for axis in ("step", "version", "wall_s") if axis in row))


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a configuration by dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _start_exit_deadline() -> None:
    def leave() -> None:
        time.sleep(FINISH_S)
        os._exit(1)

    threading.Thread(target=leave, name="exit-deadline", daemon=True).start()
