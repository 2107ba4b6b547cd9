"""`python -m rollout.check_engine IN OUT`: whether the user's engine can be imported.

Owns: importing what a rollout worker imports, in a short-lived process, so that a mistake is found before a run starts
(areal_like/user_check.py says what IN and OUT hold). Refuses: making it: that may take memory and start servers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.import_path import import_factory
from areal_like.user_check import answer
from rollout.engine.descriptor import KIND_KEY
from rollout.engine.registry import find_engine

if __name__ == "__main__":
    answer(
        Path(sys.argv[1]), Path(sys.argv[2]), lambda name, options: import_factory(find_engine(name).factory, KIND_KEY)
    )
