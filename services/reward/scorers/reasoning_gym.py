"""Scorer `reasoning_gym`: the row's task of the package reasoning-gym judges the answer with its own `score_answer`.

The scorer finds the answer in a response, and the task by the row.

Many tasks give a partial score for nearly correct answers; the score is the value. `correct` is 1 for the full score
only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import msgspec

from areal_like.errors import UserError
from areal_like.tasks.reasoning_gym import TaskOrigin, entry_at
from services.reward.scorer_options import ReasoningGymScorerOptions
from services.reward.scorers.plain_answers import is_plain
from services.reward.scorers.port import CannotJudge, ScorerInput

FULL_SCORE = 1.0 - 1e-9
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymScorer:
    """Returns the task's score of the answer, from 0 to 1."""

    def __init__(self, options: ReasoningGymScorerOptions) -> None:
        """Raises UserError if the package is missing."""
        self._options = options
        try:
            self.version = f"1/{installed_version('reasoning-gym')}"
        except PackageNotFoundError as error:
            raise UserError(
                "the package reasoning-gym is not installed",
                where="reward scorer reasoning_gym",
                remedy="pip install 'areal-like[reasoning-gym]'",
            ) from error

    def warm_up(self) -> None:
        """Import the tasks, which takes a second or two."""
        import reasoning_gym  # noqa: F401

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        tasks, entry = _task_of(msgspec.json.encode(sample.row.get("reasoning_gym"), order="deterministic"))
        if options.must_stop and sample.finish_reason != "stop":
            return {"value": 0.0, "correct": 0.0, "remark": "the answer was truncated at the token limit"}
        answer = self._answer_in(sample.response)
        if answer is None:
            return {"value": 0.0, "correct": 0.0, "remark": "no answer was found in the response"}
        if len(answer) > options.max_answer_chars:
            return {"value": 0.0, "correct": 0.0, "remark": f"the answer is too long ({len(answer)} characters)"}
        if not is_plain(answer, type(tasks)):
            return {
                "value": 0.0,
                "correct": 0.0,
                "remark": "the task would evaluate the answer, which is not plain text",
            }
        score = float(tasks.score_answer(answer=answer, entry=entry))
        return {"value": score, "correct": float(score >= FULL_SCORE)}

    def _answer_in(self, response: str) -> str | None:
        if self._options.extract == "whole":
            return response.strip() or None
        if self._options.extract == "last_line":
            return response.strip().rpartition("\n")[2].strip() or None
        tagged = _TAGGED.findall(response)
        return tagged[-1].strip() or None if tagged else None


@lru_cache(maxsize=1024)
def _task_of(place: bytes) -> tuple[Any, dict[str, Any]]:
    """The data set and entry of a row, cached because the samples of a group have the same one."""
    try:
        return entry_at(msgspec.json.decode(place, type=TaskOrigin))
    except msgspec.MsgspecError as error:
        raise CannotJudge(
            f"the row has no reasoning-gym task ({error}); use rows from the generator reasoning_gym"
        ) from error
    except UserError as error:
        raise CannotJudge(str(error)) from error
