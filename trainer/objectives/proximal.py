"""The proximal policy of the decoupled objective: how its log-prob p is computed (`trainer.loss.proximal`).

`recompute`: p is an input (of the policy at the start of the step). `behaviour`: p = b, so w = 1, ordinary PPO.
`version`: p = o, the trainer's log-prob under the version that sampled the token (arXiv 2605.12070, section 3.1): w
is the mismatch of engine and trainer, and u everything that training changed since, which the trust region bounds.
`interpolate` (A-3PO, arXiv 2512.06547; AReaL calls it `loglinear`): p = b + a * (sg(c) - b) per token, with
a = (v_proximal - v_behaviour) / (v_current - v_behaviour) and sg the stop-gradient. In step n the proximal policy is
version n - 1 and the current one is being trained to version n, so a token of staleness s = (n - 1) - v_behaviour has
a = s / (s + 1) = 1 - 1/d with the paper's d = s + 1. The anchor of a fresh token is its recorded log-prob, that of a
stale one is near the current policy.

Shapes: N sampled tokens of one micro-batch.
"""

from __future__ import annotations

import torch

from trainer.config import LossSettings
from trainer.objectives.port import TokenInputs


def interpolated_proximal(
    current_N: torch.Tensor, behaviour_N: torch.Tensor, staleness_N: torch.Tensor
) -> torch.Tensor:
    """Approximate the proximal log-prob as in A-3PO, detached: b + s / (s + 1) * (c - b)."""
    share_N = staleness_N.clamp(min=0)
    share_N = share_N / (share_N + 1)
    return behaviour_N + share_N * (current_N.detach() - behaviour_N)


def proximal_logprobs(current_N: torch.Tensor, inputs: TokenInputs, settings: LossSettings) -> torch.Tensor:
    """Return p of the configured mode, detached [N]."""
    if settings.proximal == "behaviour":
        return inputs.behaviour_N
    if settings.proximal == "version":
        assert inputs.version_N is not None, "trainer.version_logprobs is missing"
        return inputs.version_N
    if settings.proximal == "interpolate":
        return interpolated_proximal(current_N, inputs.behaviour_N, inputs.staleness_N)
    return current_N.detach() if inputs.proximal_N is None else inputs.proximal_N
