"""`python -m services.reward.check_functions IN OUT`: whether the user's scorers can be imported and called.

Owns: one short-lived process that does what a scoring process does first, so that a mistake is found before a run
starts. Refuses: scoring. IN holds a JSON list of {name, options}; OUT gets one of {index, what, remedy} per fault. What
the user's modules print or do to this process costs nobody else anything.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from areal_like.errors import UserError
from areal_like.shadow import append_user_path
from services.reward.scorers.user_function import UserFunctionScorer


def faults(wanted: list[dict[str, object]]) -> list[dict[str, object]]:
    """What is wrong with each function, by its place in `wanted`."""
    found: list[dict[str, object]] = []
    for index, one in enumerate(wanted):
        options = one["options"]
        assert isinstance(options, dict)
        try:
            UserFunctionScorer(str(one["name"]), options)
        except UserError as error:
            found.append({"index": index, "what": error.what, "remedy": error.remedy})
    return found


def main(source: Path, target: Path) -> None:
    """Read, check, write; leave at once, whatever threads the user's modules have started."""
    append_user_path()
    fresh = target.with_suffix(".tmp")
    fresh.write_text(json.dumps(faults(json.loads(source.read_text()))))
    fresh.replace(target)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
