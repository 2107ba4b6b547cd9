"""The process in which a user's own code is tried before a run starts: reads what to try, writes what is wrong with it.

Owns: the two files between it and the controller, and leaving at once whatever threads the user's modules have started.
Refuses: what right code is (the caller's `check`), deadlines and killing (the controller's).

IN holds a JSON list of {name, options}; OUT gets one of {index, where, what, remedy} per fault. What the user's modules
print or do to this process costs nobody else anything.
"""

from __future__ import annotations

import json
import os
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


def answer(source: Path, target: Path, check: Check) -> NoReturn:
    """Read, check, write, leave."""
    append_user_path()
    fresh = target.with_suffix(".tmp")
    fresh.write_text(json.dumps(faults(json.loads(source.read_text()), check)))
    fresh.replace(target)
    os._exit(0)
