"""Token mask by staleness: the number of versions between the policy that sampled the token and the trained one.

Versions are per token, so in an answer that was interrupted only the stale part is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Correction, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Bound of the staleness."""

    max: int = Field(ge=0)
    """Largest staleness that is kept, in versions."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep tokens up to the largest staleness."""
    return tokens.staleness_N <= options.max


CORRECTION = Correction(name="staleness_mask", factor=factor, options=Options, is_of_ratio=False)
