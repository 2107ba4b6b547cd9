"""`python -m rollout.check_workflow IN OUT`: checks that the user's workflow can be imported and created.

It does what a rollout worker does first, in a short-lived process, so that a mistake is found before a run starts. IN
and OUT are described in areal_like/user_check.py; options are the workflow's `options`, the names of the declared
`models`, and which of them is the `teacher`. The workflow is not run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from areal_like.user_check import answer
from rollout.workflow import check_models, load_workflow


def check(name: str, given: dict[str, Any]) -> None:
    """Import and create a workflow. Raises UserError."""
    check_models(load_workflow(name, given["options"]), given["models"], given.get("teacher", ""))


if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]), check)
