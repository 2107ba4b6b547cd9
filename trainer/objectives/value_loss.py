"""The critic's loss of each token: half the squared error, clipped as in PPO.

Values are computed in trainer/critic.py, targets in advantages/.
Shapes: N sampled tokens of one micro-batch.
"""

from __future__ import annotations

import torch


def value_loss(
    values_N: torch.Tensor, start_N: torch.Tensor, targets_N: torch.Tensor, *, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss [N], to be minimised, and a mask of the tokens whose clipped error is used, bool [N].

    With v the current value, s the one at the start of the step and R the target:

        loss = max((v - R)^2, (clamp(v, s - clip, s + clip) - R)^2) / 2

    A value that has moved by more than `clip` towards its target has no gradient (the form of the PPO implementation of
    OpenAI Baselines, and of TRL and verl).

    Args:
        values_N: with gradient.
        start_N: values at the start of the step, a constant.
        targets_N: constants.
        clip: None: plain squared error.
    """
    plain_N = (values_N - targets_N).square()
    if clip is None:
        return plain_N / 2, torch.zeros_like(plain_N, dtype=torch.bool)
    clipped_N = (values_N.clamp(start_N - clip, start_N + clip) - targets_N).square()
    return torch.maximum(plain_N, clipped_N) / 2, (clipped_N > plain_N).detach()
