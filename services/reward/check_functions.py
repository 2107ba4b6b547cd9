"""`python -m services.reward.check_functions IN OUT [TRIES]`: checks that the user's scorers can be used.

It does what a scoring process does first, in a short-lived process, so that a mistake is found before a run starts. IN
and OUT are described in areal_like/user_check.py. The rewards themselves are judged in controller/probe/findings.py.

TRIES contains JSON {limit_s, answers}; answers is a list of [row, response]: first rows, with their gold answers in
several forms. A scorer that cannot score any of them would score no sample either; a scorer may reject some forms. A
scorer that takes longer than limit_s is not checked, because runs have deadlines for that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.user_check import answer
from services.reward.composition import Part, WeightedSum
from services.reward.job import Job
from services.reward.scorers.user_function import UserFunctionScorer


def try_scorer(name: str, options: dict[str, Any], tries: Sequence[tuple[dict[str, Any], str]]) -> None:
    """Try a scorer. Raises UserError if it cannot be used, or scores none of the answers."""
    scorer = WeightedSum((Part(name, 1.0, UserFunctionScorer(name, options)),))
    reasons = []
    for row, response in tries:
        job = Job(job_id=1, scorer="", row=row, response=response, finish_reason="stop", num_tokens=len(response))
        outcome = scorer.score(job, lambda _: None)
        if outcome.kind == "scored":
            return
        reasons.append(outcome.reason.removeprefix(f"{name}: "))
    if reasons:
        what = f"the scorer returns no reward for the gold answers of the first rows ({reasons[0]})"
        raise UserError(
            what,
            where=f"reward scorer {name}",
            remedy="return a float or a dict from `score(row, response, **info)`; the columns of the row are "
            f"{', '.join(tries[0][0])}",
        )


def main(source: Path, target: Path, tries: Path | None) -> None:
    """The process."""
    if tries is None:
        answer(source, target, UserFunctionScorer)
    given: dict[str, Any] = json.loads(tries.read_text())
    answer(
        source, target, UserFunctionScorer, lambda name, options: try_scorer(name, options, given["answers"]),
        given["limit_s"],
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
