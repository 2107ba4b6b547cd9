"""Token weight by staleness: decay^s, with s the versions between the policy that sampled and the trained one.

It is a bounded preference for fresh tokens that needs no log-probs. It is not an importance weight and corrects no
bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Correction, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Decay."""

    decay: float = Field(0.9, gt=0, lt=1)
    """Factor for every version of staleness."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Compute the weight of each token by its staleness."""
    return options.decay ** tokens.staleness_N.clamp(min=0)


CORRECTION = Correction(name="staleness_weight", factor=factor, options=Options, is_of_ratio=False)
