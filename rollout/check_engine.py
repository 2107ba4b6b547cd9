"""`python -m rollout.check_engine IN OUT`: checks that the user's engine can be imported.

It imports the modules that a rollout worker imports, in a short-lived process, so that a mistake is found before a run
starts. IN and OUT are described in areal_like/user_check.py. The engine is not created, because that may allocate
memory and start servers.
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
