"""Bound on the influence of a token with a negative advantage (dual-clip PPO, arXiv 1912.09729, eq. 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dual_clipped(
    surrogate_N: torch.Tensor, ratio_N: torch.Tensor, advantage_N: torch.Tensor, bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where A < 0, count a ratio above `bound` as `bound`, without gradient. Also returns the mask of these tokens."""
    is_cut_N = (advantage_N < 0) & (ratio_N > bound)
    return (bound * advantage_N).where(is_cut_N, surrogate_N), is_cut_N
