"""`python -m services.reward.check_functions IN OUT`: whether the user's scorers can be imported and called.

Owns: doing what a scoring process does first, in a short-lived process, so that a mistake is found before a run starts
(areal_like/user_check.py says what IN and OUT hold). Refuses: scoring.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.user_check import answer
from services.reward.scorers.user_function import UserFunctionScorer

if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]), UserFunctionScorer)
