"""Scorer of the quickstart's task. The rule itself is in areal_like/tasks/running_sum.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_like.tasks import running_sum
from services.reward.scorer_options import NoOptions
from services.reward.scorers.port import CannotJudge, ScorerInput


class RunningSumScorer:
    """Returns 1.0 if the text after the last `#` is the answer and the model ended its answer, else 0.0."""

    version = "1"

    def __init__(self, options: NoOptions) -> None:
        """There are no options."""

    def warm_up(self) -> None:
        """Nothing to load."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        if "answer" not in sample.row:
            raise CannotJudge("the row has no `answer`")
        value = 1.0 if running_sum.is_correct(sample.row, sample.response, sample.finish_reason) else 0.0
        return {"value": value, "correct": value}
