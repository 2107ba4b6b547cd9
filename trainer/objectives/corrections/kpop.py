"""Token mask by the binary KL divergence (KPop, ringtech.notion.site/kpop).

With P and Q the probabilities of the token at the start of the step and under the behaviour policy, and
KLb(P, Q) = P ln(P/Q) + (1 - P) ln((1 - P)/(1 - Q)), a token is kept if max(KLb(P, Q), KLb(Q, P)) <= max_kl. Unlike a
ratio, it is sensitive to a difference between 0.9 and 0.99, and insensitive to one between 1e-6 and 1e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Correction, TokenInputs

if TYPE_CHECKING:
    import torch

HIGHEST = -1e-9
"""Log-probs are clamped to it: at 0, where other tokens have probability 0, the logarithm would be infinite."""


class Options(Settings):
    """Bound of the divergence."""

    max_kl: float = Field(gt=0)
    """Largest divergence that is kept, in nats."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep tokens of similar probability."""
    assert tokens.drift_N is not None
    b_N = tokens.behaviour_N.double()
    p_N = b_N + tokens.drift_N.double()
    return _binary_kl(p_N, b_N).maximum(_binary_kl(b_N, p_N)) <= options.max_kl


def _binary_kl(p_N: torch.Tensor, q_N: torch.Tensor) -> torch.Tensor:
    """KL between a token and all others, of log-probs; certain tokens are treated as almost certain."""
    p_N, q_N = p_N.clamp(max=HIGHEST), q_N.clamp(max=HIGHEST)
    not_p_N, not_q_N = -p_N.expm1(), -q_N.expm1()
    return p_N.exp() * (p_N - q_N) + not_p_N * (not_p_N.log() - not_q_N.log())


CORRECTION = Correction(name="kpop", factor=factor, options=Options)
