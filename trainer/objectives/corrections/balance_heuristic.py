"""Importance weight by the balance heuristic over the versions in a step (Veach and Guibas 1995, section 3.2; for
answers of mixed versions: Tong, Li and Sheng, "Importance sampling done right", 2026, section on multiple importance
sampling).

With p0 the log-prob at the start of the step, o_v the one under version v, and a_v the share of the step's sampled
tokens that version v sampled:

    weight = min(exp(p0) / sum over v of a_v exp(o_v), max)

A weight by the version that sampled the token alone, exp(p0 - o), is large if that version found the token unlikely.
This one is at most 1 / a_v for every version v near the current policy, because the step also contains tokens of other
versions. It is a weight of the staleness; the mismatch between engine and trainer at the same version is not part of
it, so it can be combined with `token_weight` and `part: mismatch`.

Every version of the step that is kept computes log-probs of all its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Bound of the weight."""

    max: float = Field(5.0, gt=0)
    """Larger weights count as this one."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Compute the weight of each token."""
    assert tokens.mixture_N is not None
    start_N = tokens.current_N if tokens.proximal_N is None else tokens.proximal_N
    assert start_N is not None
    log_weight_N = (start_N - tokens.mixture_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return log_weight_N.exp().clamp(max=options.max)


CORRECTION = Correction(
    name="balance_heuristic",
    factor=factor,
    options=Options,
    needs=Needs(versions=True, mixture=True),
    is_weight=True,
    part="staleness",
)
