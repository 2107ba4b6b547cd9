"""Mask of stale negatives: off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1; slime, TRL).

A sequence with a negative advantage is dropped if mean(b - c) > max_kl, with b the behaviour and c the current
log-prob. Pushing down an answer that the policy no longer produces teaches nothing and destabilises training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Bound of the divergence."""

    max_kl: float = Field(gt=0)
    """Largest mean of b - c over a sequence with a negative advantage, in nats."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep sequences with a non-negative advantage, and those near the current policy."""
    assert tokens.current_N is not None
    assert tokens.sequences is not None
    far_S = tokens.sequences.mean(tokens.behaviour_N - tokens.current_N) > options.max_kl
    return ~(tokens.sequences.spread(far_S) & (tokens.advantage_N < 0))


CORRECTION = Correction(name="opsm", factor=factor, options=Options, needs=Needs(sequences=True))
