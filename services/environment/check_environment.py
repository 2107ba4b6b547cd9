"""`python -m services.environment.check_environment IN OUT`: whether the user's environment can be imported and made.

Owns: doing what an environment process does first, in a short-lived process, so that a mistake is found before a run
starts (areal_like/user_check.py says what IN and OUT hold). Refuses: an episode.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.user_check import answer
from services.environment.loading import check_environment

if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]), check_environment)
