"""`python -m rollout.check_workflow IN OUT`: whether the user's workflow can be imported and made.

Owns: doing what a rollout worker does first, in a short-lived process, so that a mistake is found before a run starts
(areal_like/user_check.py says what IN and OUT hold). Refuses: running it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.user_check import answer
from rollout.workflow import load_workflow

if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]), load_workflow)
