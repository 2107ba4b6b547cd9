"""`python -m controller.telemetry.wandb_process`: hands rows from its standard input to Weights & Biases.

Owns: the one wandb run, axes of its curves. Refuses: names of curves (scalars.py), restarting itself.

In: one JSON object a line, first {"start": {...}}, then {"row": {...}}. Out: {"done": n} for the n-th line, or
{"error": "..."}. Ends when its input does; never later than FINISH_S after that.
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
    """Take lines until there are no more."""
    run: Any = None
    for number, line in enumerate(lines, start=1):
        message = json.loads(line)
        try:
            if "start" in message:
                run = begin(message["start"])
            else:
                run.log(message["row"])
        except Exception as error:  # somebody else's library; the sink counts the row as lost
            answer: dict[str, Any] = {"error": f"{type(error).__name__}: {first_line(error)}"}
            is_over = run is None  # it never began
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
    """The wandb run."""
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
