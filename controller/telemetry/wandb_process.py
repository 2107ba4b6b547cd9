"""`python -m controller.telemetry.wandb_process`: sends rows from its standard input to Weights & Biases.

Manages the one wandb run and the axes of its curves. Names of curves are in scalars.py.

Input: one JSON object per line, first {"start": {...}}, then {"row": {...}}. Output: {"done": n} for the n-th line, or
{"error": "..."}. Exits when its input ends, at most FINISH_S later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import IO, Any

from areal_like.errors import first_line
from controller.telemetry.scalars import AXIS_OF_PREFIX

FINISH_S = 60.0


def serve(lines: IO[str], answers: IO[str]) -> None:
    """Process lines until the end of the input."""
    run: Any = None
    for number, line in enumerate(lines, start=1):
        message = json.loads(line)
        try:
            if "start" in message:
                run = begin(message["start"])
            else:
                run.log(message["row"])
        except Exception as error:  # third-party library; the sink counts the row as lost
            answer: dict[str, Any] = {"error": f"{type(error).__name__}: {first_line(error)}"}
            is_over = run is None  # the run was not started
        else:
            answer, is_over = {"done": number}, False
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if is_over:
            return
    threading.Thread(target=_leave_late, name="exit-deadline", daemon=True).start()
    if run is not None:
        run.finish()


def begin(start: dict[str, Any]) -> Any:
    """Start the wandb run."""
    import wandb

    settings = wandb.Settings(console="off", disable_git=True, save_code=False, silent=True)
    run = wandb.init(
        project=start["project"], entity=start["entity"], group=start["group"], tags=start["tags"], mode=start["mode"],
        name=start["name"], id=start["id"], resume="allow", dir=start["dir"], config=start["config"], settings=settings,
        notes=start.get("notes") or None,
    )  # fmt: skip
    for prefix, axis in AXIS_OF_PREFIX.items():
        run.define_metric(axis, hidden=True)
        run.define_metric(f"{prefix}/*", step_metric=axis)
    return run


def _leave_late() -> None:
    threading.Event().wait(FINISH_S)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
