"""Samples tokens from logits, for all rows at once, and records their log-probs.

The stream: answer position p of a sample with seed s is drawn with the p-th output of Philox4x64 keyed by s (numpy
keeps that stream stable), so it does not depend on the batch, the slot, the worker or the segment. A token is the
inverse of the cumulative distribution function at that number. Log-probs that differ in the last bits (another batch
size picks another matrix kernel) can change a token only where the number falls within about 1e-6 of a boundary.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_like.wire.messages import Sampling

_SEED_MASK = (1 << 64) - 1


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """float64 [count] in (0, 1): the stream of `seed` from answer position `start` on.

    The numbers are 32-bit integers plus a half, scaled, so that number * total < total holds in float64 for any total.
    """
    stream = np.random.Philox(key=seed & _SEED_MASK)
    stream.advance(start // 4)  # one counter value gives four outputs
    skipped = start % 4
    raw = stream.random_raw(skipped + count)[skipped:]
    return ((raw >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


@dataclass(frozen=True)
class DrawPlan:
    """Sampling parameters of the active rows; a part is None if no row needs it."""

    temperature_B1: Tensor | None = None
    is_greedy_B1: Tensor | None = None
    is_all_greedy: bool = False
    top_k_B1: Tensor | None = None
    top_p_B1: Tensor | None = None

    @staticmethod
    def of(samplings: list[Sampling], vocab_size: int, device: torch.device) -> DrawPlan:
        """Plan for rows with these parameters."""

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [item.temperature == 0 for item in samplings]
        is_plain = all(item.temperature in (0, 1) for item in samplings)
        has_cut = any((item.top_p < 1 or item.top_k > 0) and item.temperature > 0 for item in samplings)
        top_k = [min(item.top_k, vocab_size) or vocab_size for item in samplings]
        top_p = [item.top_p if item.top_p < 1 else 2.0 for item in samplings]
        return DrawPlan(
            None if is_plain else column([item.temperature or 1.0 for item in samplings], torch.float32),
            column([float(flag) for flag in greedy], torch.bool) if any(greedy) else None,
            bool(greedy) and all(greedy),
            column([float(k) for k in top_k], torch.int64) if has_cut else None,
            column(top_p, torch.float32) if has_cut else None,
        )


def cut(logprobs_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor) -> Tensor:
    """Set log-probs to -inf outside the support: the k most likely tokens, and among them the smallest set with top_p
    of their probability."""
    ordered, order = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logprobs_BV.shape[-1], device=logprobs_BV.device)
    mass = ordered.exp().masked_fill(ranks >= top_k_B1, 0.0)
    before = mass.cumsum(-1) - mass
    keep = (ranks < top_k_B1) & (before < top_p_B1 * mass.sum(-1, keepdim=True))
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return logprobs_BV.masked_fill(~kept, -torch.inf)


def draw(logits_BV: Tensor, plan: DrawPlan, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens (int64 [B, 1]) and their log-probs (float32 [B, 1]): log_softmax(logits / temperature), before top-k
    and top-p.

    uniforms_B: float64 in (0, 1). If logits are not finite, neither is the log-prob.
    """
    logits = logits_BV.float()
    if plan.temperature_B1 is not None:
        logits = logits / plan.temperature_B1
    logprobs = torch.log_softmax(logits, -1)
    if plan.is_all_greedy:
        tokens = logprobs.argmax(-1, keepdim=True)
        return tokens, logprobs.gather(-1, tokens)
    supported = (
        logprobs if plan.top_k_B1 is None or plan.top_p_B1 is None else cut(logprobs, plan.top_k_B1, plan.top_p_B1)
    )
    cumulative = supported.exp().cumsum(-1, dtype=torch.float64)
    target = uniforms_B[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if plan.is_greedy_B1 is not None:
        tokens = torch.where(plan.is_greedy_B1, logprobs.argmax(-1, keepdim=True), tokens)
    return tokens, logprobs.gather(-1, tokens)
