"""The environment `reasoning_gym`: a task of the package reasoning-gym, answered in several attempts.

Answers are judged by the scorer `reasoning_gym`; questions come from the generator `reasoning_gym`.

The package has tasks of one turn; here a wrong answer may be corrected. The reward of an attempt is its improvement of
the best score so far, so the sum is the best score, and later attempts cannot reduce it.
"""

from __future__ import annotations

from typing import Any, Literal

from areal_like.environment import Step
from areal_like.errors import UserError
from services.environment.adapters.actions import OPTIONS, require
from services.reward.scorer_options import ReasoningGymScorerOptions
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.reasoning_gym import FULL_SCORE, ReasoningGymScorer

MAX_ATTEMPTS = 64


class ReasoningGymEnvironment:
    """One question."""

    def __init__(
        self, *, max_attempts: int = 3, extract: Literal["tag", "last_line", "whole"] = "tag", reveal: bool = False
    ) -> None:
        """Args:
            max_attempts: largest number of answers to one question. extract: position of the answer in a turn, as in
                the scorer `reasoning_gym`.
            reveal: show the policy the score of an attempt; otherwise only that it is wrong.

        Raises:
            UserError: reasoning-gym is missing, or an option is out of range.
        """
        require("reasoning_gym", "reasoning-gym", "reasoning-gym")
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or not 1 <= max_attempts <= MAX_ATTEMPTS:
            what = f"max_attempts must be a whole number from 1 to {MAX_ATTEMPTS}, not {max_attempts!r}"
            raise UserError(what, where=f"{OPTIONS}.max_attempts")
        if extract not in ("tag", "last_line", "whole"):
            raise UserError(
                f"`extract` must be `tag`, `last_line` or `whole`, not {extract!r}", where=f"{OPTIONS}.extract"
            )
        self._max_attempts, self._reveal = max_attempts, reveal
        self._scorer = ReasoningGymScorer(ReasoningGymScorerOptions(extract=extract))
        self._row: dict[str, Any] = {}
        self._num_attempts, self._best = 0, 0.0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Take the row's question, which is the prompt. Raises CannotJudge for a row without one."""
        self._row = row
        self._judged("")

    def step(self, action: str) -> Step:
        """Judge an attempt."""
        self._num_attempts += 1
        score, remark = self._judged(action)
        reward, self._best = max(score - self._best, 0.0), max(score, self._best)
        is_right = score >= FULL_SCORE
        said = "That is right." if is_right else remark or "That is not right."
        if self._reveal and not is_right:
            said += f" The score is {score:.2f}."
        return Step(
            observation=f"{said} Try again." if not is_right else said,
            reward=reward,
            is_done=is_right or self._num_attempts == self._max_attempts,
            components={"correct": float(is_right), "attempts": float(self._num_attempts)},
        )

    def _judged(self, response: str) -> tuple[float, str]:
        """Score of an answer, and an error of its form (empty: none)."""
        found = self._scorer.score(ScorerInput(row=self._row, response=response, finish_reason="stop", num_tokens=0))
        remark = str(found.get("remark", ""))
        return float(found["value"]), f"{remark[:1].upper()}{remark[1:]}." if remark else ""
