"""Mask by an estimate of the divergence from the behaviour policy (verl's `token_k2`, `seq_mean_k3`, ...).

With d the log-prob at the start of the step minus the behaviour log-prob, k2 = d^2 / 2 and k3 = exp(d) - d - 1, which
estimates KL(behaviour || start) on tokens that the behaviour policy sampled. Tokens are kept if the estimate is at most
`max_kl`; with the sequence levels, sequences are kept if the mean, the sum or the maximum over their tokens is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Estimator and bound."""

    max_kl: float = Field(gt=0)
    """Largest estimate that is kept, in nats."""
    estimator: Literal["k2", "k3"] = "k3"
    """k3 penalises tokens that became more likely more strongly, k2 both directions equally."""
    level: Literal["token", "sequence_mean", "sequence_sum", "sequence_max"] = "sequence_mean"
    """`token`: tokens are dropped individually; otherwise whole sequences, by their mean, sum or largest token."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep tokens or sequences near the policy that sampled them."""
    assert tokens.drift_N is not None
    assert tokens.sequences is not None
    drift_N = tokens.drift_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    kl_N = drift_N.square() / 2 if options.estimator == "k2" else drift_N.exp() - drift_N - 1.0
    if options.level == "token":
        return kl_N <= options.max_kl
    sequences = tokens.sequences
    reduce = {"sequence_mean": sequences.mean, "sequence_sum": sequences.sum, "sequence_max": sequences.max}
    return sequences.spread(reduce[options.level](kl_N) <= options.max_kl)


CORRECTION = Correction(name="kl_rejection", factor=factor, options=Options, needs=Needs(sequences=True))
