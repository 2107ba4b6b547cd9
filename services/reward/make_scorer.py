"""Creates a scorer from its settings.

Scorers are imported only where they are used, because some need optional packages. The table of kinds is in
scorer_registry.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import pydantic

from areal_like.errors import UserError
from areal_like.import_path import import_factory
from areal_like.settings import Settings
from services.reward.config import ScorerSettings
from services.reward.scorer_registry import SCORERS
from services.reward.scorers.port import Scorer


def make_scorer(settings: ScorerSettings) -> Scorer:
    """Create the scorer that the settings name. Raises UserError: no such scorer, bad options, a function that cannot
    be used."""
    where = f"reward scorer {settings.kind}"
    if ":" in settings.kind:
        from services.reward.scorers.user_function import UserFunctionScorer

        return UserFunctionScorer(settings.kind, settings.options)
    if settings.kind in SCORERS:
        kind = SCORERS[settings.kind]
        options = _options(kind.options, settings.options, where)
        scorer: Scorer = import_factory(f"services.reward.scorers.{kind.scorer}", where)(options)
        return scorer
    near = difflib.get_close_matches(settings.kind, SCORERS, n=1)
    known = f"use {', '.join(SCORERS)}, or your own module:function"
    remedy = f"did you mean {near[0]}?" if near else known
    raise UserError("there is no such scorer", where=where, remedy=remedy)


def _options(kind: type[Settings], options: Mapping[str, Any], where: str) -> Settings:
    try:
        return kind.model_validate(dict(options))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        remedy = (
            f"the options are {', '.join(kind.model_fields)}"
            if kind.model_fields
            else "remove the options; the scorer has none"
        )
        raise UserError(
            f"{f'option {key}' if key else 'options'}: {first['msg'].removeprefix('Value error, ')}",
            where=where,
            remedy=remedy,
        ) from None
