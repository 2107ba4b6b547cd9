"""The off-policy correction weight w = exp(p - b) of a token, and the four ways to bound it: `trainer.loss.weight`.

p is the proximal log-prob, b the behaviour log-prob; the weight is a constant for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.config import WeightClip


def _exact(weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """eq. 5 of arXiv 2505.24298"""
    return weight_N


def _truncate(weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """min(w, max)"""
    return weight_N.clamp(max=clip.max)


def _mask(weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """w inside [low, max], else 0 (IcePop, arXiv 2510.18855)"""
    return weight_N.where((weight_N >= clip.low) & (weight_N <= clip.max), 0.0)


def _off(weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """1"""
    return weight_N.new_ones(weight_N.shape)


MODES: Mapping[str, Callable[[torch.Tensor, WeightClip], torch.Tensor]] = {
    "exact": _exact,
    "truncate": _truncate,
    "mask": _mask,
    "off": _off,
}


def plain_weights(log_weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """Compute exp(p - b), with p - b clamped first."""
    return log_weight_N.clamp(-clip.log_clamp, clip.log_clamp).exp()


def correction_weights(log_weight_N: torch.Tensor, clip: WeightClip) -> torch.Tensor:
    """Compute w [N] of p - b in the configured mode."""
    return MODES[clip.mode](plain_weights(log_weight_N, clip), clip)
