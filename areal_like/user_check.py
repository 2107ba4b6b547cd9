"""The process that tries a user's code before a run starts: it reads what to check and writes the faults it finds.

IN contains a JSON list of {name, options}; OUT gets one of {index, where, what, remedy} per fault. The user's modules
can affect only this process, and it exits at once even if they have started threads. Deadlines are enforced by the
controller.
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
"""Called with a name (`module:function`) and its options; raises UserError if it cannot be used."""


def faults(wanted: list[dict[str, Any]], check: Check) -> list[dict[str, object]]:
    """Faults of all entries, each with its index in `wanted`."""
    found: list[dict[str, object]] = []
    for index, one in enumerate(wanted):
        try:
            check(str(one["name"]), one["options"])
        except UserError as error:
            found.append({"index": index, "where": error.where, "what": error.what, "remedy": error.remedy})
    return found


def answer(source: Path, target: Path, check: Check, trial: Check | None = None, limit_s: float = 0.0) -> NoReturn:
    """Read IN, check each entry, write OUT, and exit.

    trial: called for each entry that passes `check`, within `limit_s` seconds. The code may hang here as in a run:
    after the limit the process exits with the faults found so far.
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
