"""The process in which a user's own code is tried before a run starts: reads what to try, writes what is wrong with it.

Owns: the two files between it and the controller, and leaving at once whatever threads the user's modules have started.
Refuses: what right code is (the caller's `check`), deadlines and killing (the controller's).

IN holds a JSON list of {name, options}; OUT gets one of {index, where, what, remedy} per fault. What the user's modules
print or do to this process costs nobody else anything.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from areal_like.errors import UserError
from areal_like.import_check import append_user_path

Check = Callable[[str, dict[str, Any]], object]
"""Called with a name (`module:function`) and its options; raises UserError where it cannot be used."""


def faults(wanted: list[dict[str, Any]], check: Check) -> list[dict[str, object]]:
    """What is wrong with each, by its place in `wanted`."""
    found: list[dict[str, object]] = []
    for index, one in enumerate(wanted):
        try:
            check(str(one["name"]), one["options"])
        except UserError as error:
            found.append({"index": index, "where": error.where, "what": error.what, "remedy": error.remedy})
    return found


def answer(source: Path, target: Path, check: Check, trial: Check | None = None, limit_s: float = 0.0) -> NoReturn:
    """Read, check, write, leave.

    trial: what is done with each one that `check` finds good, in `limit_s` seconds. Code that may hang in a run may
    hang here as well: past the limit the process leaves, with the faults that it has found until then.
    """
    append_user_path()
    wanted = json.loads(source.read_text())
    found = faults(wanted, check)
    _write(target, found)
    faulty = {fault["index"] for fault in found}
    for index, one in enumerate(wanted):
        if trial is None or index in faulty:
            continue
        watch = threading.Timer(limit_s, os._exit, [0])
        watch.daemon = True
        watch.start()
        found += [{**fault, "index": index} for fault in faults([one], trial)]
        watch.cancel()
        _write(target, found)
    os._exit(0)


def _write(target: Path, found: list[dict[str, object]]) -> None:
    fresh = target.with_suffix(".tmp")
    fresh.write_text(json.dumps(found))
    fresh.replace(target)
