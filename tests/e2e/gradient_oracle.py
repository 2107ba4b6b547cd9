"""What the policy gradient would be on-policy, for answers that a differing engine drew.

Answers are one token long, and few prompts are asked many times. So the on-policy gradient is an exact sum over the
vocabulary of each prompt, and the trainer's estimate is a mean of independent draws of it, if and only if the
correction weight is right, whatever the engine. Both are looked at along one direction, the one in which the estimate
without the weight is most wrong; it follows from the prompts alone.

Shapes: N answers, U prompts, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config import LossSettings, WeightClip
from trainer.objectives.loss import policy_loss
from trainer.objectives.port import TokenInputs

STEP = 1e-4
"""Of the difference quotients, in double precision along a direction of length 1."""


@dataclass(frozen=True)
class Drawn:
    """One answer: which prompt it answers, its token, and the recorded log-prob."""

    prompt: int
    token: int
    recorded: float


@dataclass(frozen=True)
class Verdict:
    """How many standard errors the mean estimate is away from the on-policy gradient, with and without the weight.

    gap_nats: mean distance of recorded log-probs from the trainer's. loss_error: relative distance of the gradient of
    the trainer's own loss from the mean of the weighted draws.
    """

    z_weighted: float
    z_unweighted: float
    gap_nats: float
    loss_error: float


def rounded_to_five_levels(model: Any) -> Any:
    """The model with every matrix as a coarse copy would hold it: integers from -2 to 2, one scale per row."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        if parameter.ndim > 1:
            scale = parameter.abs().amax(-1, keepdim=True) / 2
            parameter.copy_((parameter / scale).round() * scale)
    return rounded


def judge(
    trainer: Any, engine: Any, prompts_U: Sequence[np.ndarray], answers: Sequence[Drawn], seed: int = 0
) -> Verdict:
    """`trainer`, `engine`: the models on both sides; prompts of equal length; sampling at temperature 1."""
    ids_UP = torch.from_numpy(np.stack(prompts_U).astype(np.int64))
    exact, other = copy.deepcopy(trainer).double(), copy.deepcopy(engine).double()
    vocabulary = exact.get_output_embeddings().weight.shape[0]
    advantage_V = torch.randn(vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    direction = _worst_direction(exact, other, ids_UP, advantage_V)
    policy_UV = _logprobs(exact, ids_UP)
    slope_UV = (
        _logprobs(_moved(exact, direction, STEP), ids_UP) - _logprobs(_moved(exact, direction, -STEP), ids_UP)
    ) / (2 * STEP)
    truth_U = (policy_UV.exp() * advantage_V * slope_UV).sum(-1)
    at_N, token_N = torch.tensor([one.prompt for one in answers]), torch.tensor([one.token for one in answers])
    recorded_N = torch.tensor([one.recorded for one in answers])
    log_weight_N = policy_UV[at_N, token_N] - recorded_N
    plain_N = advantage_V[token_N] * slope_UV[at_N, token_N]
    weighted_N = log_weight_N.exp() * plain_N
    from_loss = _slope_of_loss(trainer, direction, ids_UP[at_N], token_N, recorded_N, advantage_V[token_N].float())
    return Verdict(
        z_weighted=_z(weighted_N - truth_U[at_N]),
        z_unweighted=_z(plain_N - truth_U[at_N]),
        gap_nats=float(log_weight_N.abs().mean()),
        loss_error=abs(from_loss + float(weighted_N.mean())) / float(weighted_N.abs().mean()),
    )


def _logprobs(model: Any, ids_UP: Tensor) -> Tensor:
    """[U, V] of the token after each prompt."""
    out: Tensor = model(input_ids=ids_UP, use_cache=False).logits[:, -1].log_softmax(-1)
    return out


def _worst_direction(exact: Any, other: Any, ids_UP: Tensor, advantage_V: Tensor) -> list[Tensor]:
    """Of length 1: the gradient of what sampling from `other` instead of `exact` adds."""
    exact.requires_grad_(True)
    log_policy_UV = _logprobs(exact, ids_UP)
    excess_UV = _logprobs(other, ids_UP).exp() - log_policy_UV.exp().detach()
    found = torch.autograd.grad((excess_UV * advantage_V * log_policy_UV).sum(), list(exact.parameters()))
    exact.requires_grad_(False)
    length = torch.stack([part.square().sum() for part in found]).sum().sqrt()
    return [part / length for part in found]


def _moved(model: Any, direction: list[Tensor], by: float) -> Any:
    moved = copy.deepcopy(model)
    for parameter, part in zip(moved.parameters(), direction, strict=True):
        parameter.add_(part, alpha=by)
    return moved


def _slope_of_loss(
    trainer: Any, direction: list[Tensor], ids_NP: Tensor, token_N: Tensor, recorded_N: Tensor, advantage_N: Tensor
) -> float:
    """Slope of the trainer's decoupled loss along the direction, with the exact weight."""
    model = copy.deepcopy(trainer).requires_grad_(True)
    current_N = _logprobs(model, ids_NP).gather(1, token_N[:, None])[:, 0]
    share_N = torch.full_like(recorded_N, 1.0 / len(recorded_N))
    inputs = TokenInputs(recorded_N, advantage_N, torch.zeros_like(recorded_N), share_N)
    settings = LossSettings(weight=WeightClip(mode="exact"))
    loss, _ = policy_loss(current_N, torch.zeros_like(recorded_N), inputs, settings)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return float(sum((part.double() * along).sum() for part, along in zip(found, direction, strict=True)))


def _z(difference_N: Tensor) -> float:
    """Of a mean of zero, in standard errors."""
    return float(difference_N.mean() / (difference_N.std() / len(difference_N) ** 0.5))
