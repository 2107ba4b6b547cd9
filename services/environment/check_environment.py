"""`python -m services.environment.check_environment IN OUT`: checks that the user's environment can be imported and
created.

It does what an environment process does first, in a short-lived process, so that a mistake is found before a run
starts. IN and OUT are described in areal_like/user_check.py. No episode is run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.user_check import answer
from services.environment.loading import check_environment

if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]), check_environment)
