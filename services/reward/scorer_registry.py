"""The built-in scorers. A new one needs a file in `scorers/` and a line in `SCORERS`. Imports neither torch nor a
scorer.
"""

from __future__ import annotations

from typing import NamedTuple

from areal_like.settings import Settings
from services.reward.code_options import CodeOptions
from services.reward.scorer_options import (
    FormatOptions,
    HttpOptions,
    JudgeOptions,
    LengthOptions,
    MathOptions,
    NoOptions,
    OverlongOptions,
    ReasoningGymScorerOptions,
    RewardModelOptions,
)


class ScorerKind(NamedTuple):
    """Description of a scorer, available before it is imported."""

    options: type[Settings]
    """Class of `options` in the configuration, checked before anything starts."""
    scorer: str
    """Module in `scorers/` and class, `module:Class`; imported only in the processes that score."""


SCORERS: dict[str, ScorerKind] = {
    "math": ScorerKind(MathOptions, "maths:MathScorer"),
    "code": ScorerKind(CodeOptions, "programs:CodeScorer"),
    "running_sum": ScorerKind(NoOptions, "running_sum:RunningSumScorer"),
    "format": ScorerKind(FormatOptions, "response_format:FormatScorer"),
    "overlong": ScorerKind(OverlongOptions, "lengths:OverlongScorer"),
    "length": ScorerKind(LengthOptions, "lengths:LengthScorer"),
    "http": ScorerKind(HttpOptions, "remote:HttpScorer"),
    "llm_judge": ScorerKind(JudgeOptions, "llm_judge:JudgeScorer"),
    "reward_model": ScorerKind(RewardModelOptions, "reward_model:RewardModelScorer"),
    "reasoning_gym": ScorerKind(ReasoningGymScorerOptions, "reasoning_gym:ReasoningGymScorer"),
}
"""Built-in scorers by `kind`; a user's are named `module:function`."""
