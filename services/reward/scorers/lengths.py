"""Scorers `overlong` and `length`: rewards by the length of an answer in tokens, whatever its content.

They never return `correct`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.reward.scorer_options import LengthOptions, OverlongOptions
from services.reward.scorers.port import ScorerInput


def soft_overlong_penalty(num_tokens: int, max_tokens: int, soft_tokens: int) -> float:
    """A penalty in [-1, 0]: 0 up to max_tokens - soft_tokens, -1 from max_tokens on, linear between.

    DAPO, arXiv 2503.14476, section 3.4, eq. 13, with |y| = num_tokens, L_max = max_tokens, L_cache = soft_tokens.
    """
    into_zone = num_tokens - (max_tokens - soft_tokens)
    return -min(max(into_zone / soft_tokens, 0.0), 1.0)


class OverlongScorer:
    """Returns `soft_overlong_penalty` times `penalty`, at most 0."""

    version = "1"

    def __init__(self, options: OverlongOptions) -> None:
        self._options = options

    def warm_up(self) -> None:
        """Nothing to load."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        share = soft_overlong_penalty(sample.num_tokens, options.max_tokens, options.soft_tokens)
        if options.cut_is_overlong and sample.finish_reason == "length":
            share = -1.0
        return {"value": share * options.penalty + 0.0}  # no -0.0 in ledgers


class LengthScorer:
    """Returns 1 within the bounds, falling to 0 over the margin outside them."""

    version = "1"

    def __init__(self, options: LengthOptions) -> None:
        self._options = options

    def warm_up(self) -> None:
        """Nothing to load."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        excess = max(options.min_tokens - sample.num_tokens, 0)
        if options.max_tokens is not None:
            excess = max(sample.num_tokens - options.max_tokens, excess)
        if not excess or not options.margin_tokens:
            return {"value": float(not excess)}
        return {"value": max(0.0, 1.0 - excess / options.margin_tokens)}
