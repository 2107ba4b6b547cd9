"""Which scorer a kind names, and the making of one from its settings.

Owns: the table of kinds, the check of options. Refuses: what a scorer does (scorers/), sums (composition). A scorer's
module is imported only where it is used: some need packages of an extra.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pydantic

from areal_like.config import Settings
from areal_like.errors import UserError
from services.config import BUILT_IN_SCORERS, ScorerSettings
from services.reward.scorers.port import Scorer

_SCORERS = {
    "math": ("maths", "MathScorer", "MathOptions"),
    "code": ("programs", "CodeScorer", "CodeOptions"),
    "format": ("response_format", "FormatScorer", "FormatOptions"),
    "overlong": ("lengths", "OverlongScorer", "OverlongOptions"),
    "length": ("lengths", "LengthScorer", "LengthOptions"),
    "http": ("remote", "HttpScorer", "HttpOptions"),
    "llm_judge": ("llm_judge", "JudgeScorer", "JudgeOptions"),
    "reward_model": ("reward_model", "RewardModelScorer", "RewardModelOptions"),
    "reasoning_gym": ("reasoning_gym", "ReasoningGymScorer", "ReasoningGymScorerOptions"),
}
"""Module below services.reward.scorers, class, and class of its options (a name in the same module), by kind."""


def make_scorer(settings: ScorerSettings) -> Scorer:
    """The scorer these settings name. Raises UserError: no such scorer, bad options, a function that cannot be used."""
    where = f"reward scorer {settings.kind}"
    if ":" in settings.kind:
        from services.reward.scorers.user_function import UserFunctionScorer

        return UserFunctionScorer(settings.kind, settings.options)
    if settings.kind == "running_sum":
        from services.reward.scorers.running_sum import RunningSumScorer

        if settings.options:
            raise UserError("takes no options", where=where)
        return RunningSumScorer()
    if settings.kind in _SCORERS:
        module_name, scorer_name, options_name = _SCORERS[settings.kind]
        module = import_module(f"services.reward.scorers.{module_name}")
        options = _options(getattr(module, options_name), settings.options, where)
        scorer: Scorer = getattr(module, scorer_name)(options)
        return scorer
    near = difflib.get_close_matches(settings.kind, BUILT_IN_SCORERS, n=1)
    known = f"there are {', '.join(BUILT_IN_SCORERS)} and module:function of your own"
    remedy = f"did you mean {near[0]}?" if near else known
    raise UserError("there is no such scorer", where=where, remedy=remedy)


def _options(kind: type[Settings], options: Mapping[str, Any], where: str) -> Settings:
    try:
        return kind.model_validate(dict(options))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "as a whole"
        remedy = f"options are {', '.join(kind.model_fields)}"
        raise UserError(f"option {key}: {first['msg']}", where=where, remedy=remedy) from error
