"""The loss of one micro-batch: the configured objective, its correction weight, KL and entropy, averaged over the step.

The objectives are in losses/, advantages in advantage.py. Nothing is averaged over a micro-batch, a mini-batch or a
rank: the weights are computed in aggregation.py and the sums in loss_sums.py.

For a token with behaviour log-prob b (recorded), proximal p and the objective's own loss l:

    w = exp(p - b)        off-policy correction, a constant for the gradient; p - b is clamped first
    m = product of the masks and weights of `corrections`, also constants for the gradient
    loss = m * w * l + kl_coef * KL - entropy_coef * entropy

Shapes: N sampled tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from areal_like.errors import UserError
from trainer.config import LossSettings
from trainer.objectives.corrections.weight import correction_weights
from trainer.objectives.kl import KL_ESTIMATORS
from trainer.objectives.loss_sums import LossSums, RatioParts
from trainer.objectives.own_code import CORRECTION_KEY, LOSS_KEY
from trainer.objectives.port import LOG_RATIO_CLAMP, TokenInputs, TokenLoss
from trainer.objectives.proximal import proximal_logprobs
from trainer.objectives.registry import ChosenLoss, loss_of
from trainer.objectives.versions import with_version_logprobs


def policy_loss(
    current_N: torch.Tensor,
    entropy_N: torch.Tensor,
    inputs: TokenInputs,
    settings: LossSettings,
    chosen: ChosenLoss | None = None,
) -> tuple[torch.Tensor, LossSums]:
    """Compute this micro-batch's part of its update's loss (a scalar to call backward on), and sums for the metrics.

    The KL term is an estimate over the sampled tokens, not reweighted to the current policy (GRPO, arXiv 2402.03300,
    does the same with k3). Masked tokens have weight 0 and stay in the denominator.

    Args:
        current_N: log-probs under the current policy, with gradient.
        entropy_N: entropies over the whole vocabulary; a constant if no part of the loss needs their gradient.
        inputs: all other tensors.
        settings: the section trainer.loss.
        chosen: the loss of `settings`, if the caller has it already.

    Raises:
        UserError: a user's loss returns a value of another shape.
    """
    chosen = chosen or loss_of(settings)
    start_N = current_N.detach() if inputs.proximal_N is None else inputs.proximal_N
    inputs = with_version_logprobs(inputs, start_N)
    proximal_N = proximal_logprobs(current_N, inputs, settings)
    log_weight_N = proximal_N - inputs.behaviour_N
    weight_N = correction_weights(log_weight_N, settings.weight)
    if settings.proximal == "behaviour":
        weight_N = torch.ones_like(weight_N)  # independent of the clip: this is ordinary PPO
    tokens = replace(inputs, proximal_N=proximal_N, entropy_N=entropy_N if chosen.needs.entropy else None)
    own = checked(chosen.objective.loss(current_N, tokens, chosen.options), current_N, chosen.objective.name)
    if chosen.corrections:
        weight_N, metrics = _corrected(weight_N, current_N, inputs, chosen)
        own = replace(own, token_metrics={**own.token_metrics, **metrics})
    token_loss_N = weight_N * own.policy_N
    if own.unweighted_N is not None:
        token_loss_N = token_loss_N + own.unweighted_N
    kl_reference_N = None
    if settings.kl_coef > 0 and settings.kl_in == "loss":
        assert inputs.reference_N is not None, "kl_coef needs the reference model's log-probs"
        kl_reference_N = KL_ESTIMATORS[settings.kl_estimator](current_N, inputs.reference_N)
        token_loss_N = token_loss_N + settings.kl_coef * kl_reference_N
    if settings.entropy_coef > 0:
        token_loss_N = token_loss_N - settings.entropy_coef * entropy_N
    loss = (inputs.coefficient_N * token_loss_N).sum()
    with torch.no_grad():
        log_ratio_N = (current_N - proximal_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        sums = LossSums.of(
            loss=loss,
            entropy_N=entropy_N,
            ratio_N=log_ratio_N.exp(),
            log_ratio_N=log_ratio_N,
            log_weight_N=log_weight_N,
            weight_N=weight_N,
            kl_reference_N=kl_reference_N,
            clip=settings.weight,
            own=own,
            parts=None if inputs.recalled is None else RatioParts.of(inputs, start_N),
        )
    return loss, sums


@torch.no_grad()
def _corrected(
    weight_N: torch.Tensor, current_N: torch.Tensor, inputs: TokenInputs, chosen: ChosenLoss
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Multiply the weight by all corrections. Also returns their metrics: shares of masked tokens, means of weights."""
    start_N = current_N if inputs.proximal_N is None else inputs.proximal_N
    tokens = replace(inputs, current_N=current_N.detach(), drift_N=start_N - inputs.behaviour_N)
    metrics = {}
    for correction, options in chosen.corrections:
        factor_N = correction.factor(tokens, options)
        _check_shape(factor_N, current_N, f"{correction.name} returned", where=CORRECTION_KEY)
        is_mask = factor_N.dtype == torch.bool
        metrics[f"{correction.name}_masked_share" if is_mask else f"{correction.name}_mean"] = (
            ~factor_N if is_mask else factor_N
        )
        weight_N = weight_N * factor_N
    return weight_N, metrics


def checked(result: TokenLoss, current_N: torch.Tensor, name: str) -> TokenLoss:
    """Check that the result has one number for each token. Raises UserError."""
    for values_N in (result.policy_N, result.unweighted_N):
        _check_shape(values_N if values_N is not None else result.policy_N, current_N, f"{name} returned")
    for metric, values_N in result.token_metrics.items():
        _check_shape(values_N, current_N, f"{name} returned the metric {metric}:")
    return result


def _check_shape(values_N: Any, current_N: torch.Tensor, what: str, *, where: str = LOSS_KEY) -> None:
    if not isinstance(values_N, torch.Tensor) or values_N.shape != current_N.shape:
        is_tensor = isinstance(values_N, torch.Tensor)
        returned = (
            f"a tensor of shape {list(values_N.shape)}" if is_tensor else f"an object of type {type(values_N).__name__}"
        )
        remedy = "return a tensor of shape [N] with one value for each token, not the mean"
        raise UserError(f"{what} {returned} for {len(current_N)} tokens", where=where, remedy=remedy)
