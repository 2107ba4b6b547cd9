"""User-defined losses, corrections and advantages, named by import path. Imports no torch (the user's module may).

They are imported here, and a descriptor is created for a plain function. trial.py and trainer/check_objectives.py call
them once before a run.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from areal_like.errors import UserError
from areal_like.import_path import import_object
from trainer.objectives.options import keywords, options_of_function
from trainer.objectives.port import (
    Advantage,
    Correction,
    Needs,
    Objective,
    RewardedSamples,
    TokenInputs,
    TokenLoss,
)

LOSS_KEY = "trainer.loss.kind"
CORRECTION_KEY = "trainer.loss.corrections"
ADVANTAGE_KEY = "trainer.advantage.kind"
_DESCRIPTORS = {LOSS_KEY: Objective, CORRECTION_KEY: Correction, ADVANTAGE_KEY: Advantage}


def is_own(name: str) -> bool:
    """True for `module:function`, False for a built-in name."""
    return ":" in name


@functools.cache
def own_objective(name: str) -> Objective:
    """Import `module:name`, an Objective or a function `loss(logprobs_N, tokens, **options)`. Raises UserError.

    The function returns the loss of each token [N], or a pair of it and a dictionary of metrics [N] by name.
    """
    found = _load(name, LOSS_KEY)
    if isinstance(found, Objective):
        return found

    def loss(current_N: Any, tokens: TokenInputs, options: Any) -> TokenLoss:
        result = found(current_N, tokens, **keywords(options))
        if isinstance(result, TokenLoss):
            return result
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return TokenLoss(result[0], token_metrics=result[1])
        return TokenLoss(result)

    needs = Needs(sequences=True, every_sequence=True)
    return Objective(name=name, loss=loss, options=options_of_function(found, 2), needs=needs)


@functools.cache
def own_correction(name: str) -> Correction:
    """Import `module:name`, a Correction or a function `correction(tokens, **options)`. Raises UserError."""
    found = _load(name, CORRECTION_KEY)
    if isinstance(found, Correction):
        return found

    def factor(tokens: TokenInputs, options: Any) -> Any:
        return found(tokens, **keywords(options))

    short = name.rpartition(":")[2]
    return Correction(short, factor, options=options_of_function(found, 1), needs=Needs(sequences=True))


@functools.cache
def own_advantage(name: str) -> Advantage:
    """Import `module:name`, an Advantage or a function `advantage(samples, **options)`. Raises UserError.

    A plain function may compare samples across groups, so a group of equal rewards may have advantages.
    """
    found = _load(name, ADVANTAGE_KEY)
    if isinstance(found, Advantage):
        return found

    def compute(samples: RewardedSamples, options: Any) -> np.ndarray:
        result: np.ndarray = found(samples, **keywords(options))
        return result

    return Advantage(name=name, compute=compute, options=options_of_function(found, 1), is_within_group=False)


def _load(name: str, where: str) -> Any:
    """Import `module:attribute`, a descriptor or a callable."""
    found = import_object(name, where)
    descriptors = tuple(_DESCRIPTORS.values())
    if isinstance(found, descriptors) and not isinstance(found, _DESCRIPTORS[where]):
        article = "a" if isinstance(found, Correction) else "an"
        what = f"{name} is {article} {type(found).__name__}, which cannot be used for {where}"
        raise UserError(what, where=where, remedy="correct the name")
    if not isinstance(found, descriptors) and not callable(found):
        raise UserError(f"{name} is not callable", where=where, remedy="specify a function")
    return found
