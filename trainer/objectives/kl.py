"""Estimators of the KL divergence from the reference model, on tokens that the policy sampled.

The source is J. Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html. loss.py adds the estimate to
the loss, trainer/step_advantages.py subtracts it from the reward.

With x the log-prob under the policy and r the one under the reference, on tokens sampled from the policy:

    k1 = x - r                      unbiased; may be negative
    k2 = (x - r)^2 / 2              biased, but its gradient is that of KL
    k3 = exp(r - x) - (r - x) - 1   unbiased, never negative; its gradient is that of the opposite direction

As a term of the loss, k1 only has the gradient of log-probs, whose mean is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trainer.objectives.port import LOG_RATIO_CLAMP

if TYPE_CHECKING:
    import torch


def k1(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) per token as a difference of log-probs."""
    return policy_N - reference_N


def k2(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) per token as half of a squared difference."""
    return (policy_N - reference_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).square() / 2


def k3(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) per token; never negative."""
    log_ratio_N = (reference_N - policy_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return log_ratio_N.exp() - log_ratio_N - 1.0


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By `trainer.loss.kl_estimator`."""
