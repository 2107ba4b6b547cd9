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

from areal_like.errors import UserError
from areal_like.settings import Settings
from services.reward.config import BUILT_IN_SCORERS, OPTIONS, ScorerSettings
from services.reward.scorers.port import Scorer

_SCORERS = {
    "math": ("maths", "MathScorer"),
    "code": ("programs", "CodeScorer"),
    "running_sum": ("running_sum", "RunningSumScorer"),
    "format": ("response_format", "FormatScorer"),
    "overlong": ("lengths", "OverlongScorer"),
    "length": ("lengths", "LengthScorer"),
    "http": ("remote", "HttpScorer"),
    "llm_judge": ("llm_judge", "JudgeScorer"),
    "reward_model": ("reward_model", "RewardModelScorer"),
    "reasoning_gym": ("reasoning_gym", "ReasoningGymScorer"),
}
"""Module below services.reward.scorers, and class, by kind."""


def make_scorer(settings: ScorerSettings) -> Scorer:
    """The scorer these settings name. Raises UserError: no such scorer, bad options, a function that cannot be used."""
    where = f"reward scorer {settings.kind}"
    if ":" in settings.kind:
        from services.reward.scorers.user_function import UserFunctionScorer

        return UserFunctionScorer(settings.kind, settings.options)
    if settings.kind in _SCORERS:
        module_name, scorer_name = _SCORERS[settings.kind]
        options = _options(OPTIONS[settings.kind], settings.options, where)
        module = import_module(f"services.reward.scorers.{module_name}")
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
        remedy = f"options are {', '.join(kind.model_fields)}" if kind.model_fields else "it takes none"
        raise UserError(
            f"option {key}: {first['msg'].removeprefix('Value error, ')}", where=where, remedy=remedy
        ) from None
