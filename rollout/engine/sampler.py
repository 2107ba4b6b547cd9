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
    logprobs = _logprobs(logits_BV, plan)
    if plan.is_all_greedy:
        tokens = logprobs.argmax(-1, keepdim=True)
        return tokens, logprobs.gather(-1, tokens)
    cumulative, target = _cumulative(logprobs, plan, uniforms_B)
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logprobs.shape[-1] - 1)
    if plan.is_greedy_B1 is not None:
        tokens = torch.where(plan.is_greedy_B1, logprobs.argmax(-1, keepdim=True), tokens)
    return tokens, logprobs.gather(-1, tokens)


def redraw(logits_BV: Tensor, plan: DrawPlan, uniforms_B: Tensor, recorded_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw as `draw`, and compare with recorded tokens (int64 [B, 1]).

    No row may be greedy. `plan` may have a single row, which then applies to all.

    Returns:
        The tokens drawn (int64 [B, 1]); the log-probs of the recorded tokens (float32 [B, 1]); and margins (float64
        [B, 1]): the amount, as a probability, by which the random number would have to change for the recorded token to
        be drawn. 0 if it is drawn, and infinity if no number gives it.
    """
    assert not plan.is_all_greedy, "a greedy token is not drawn"
    logprobs = _logprobs(logits_BV, plan)
    cumulative, target = _cumulative(logprobs, plan, uniforms_B)
    drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=logprobs.shape[-1] - 1)
    high = cumulative.gather(-1, recorded_B1)
    low = torch.where(recorded_B1 > 0, cumulative.gather(-1, (recorded_B1 - 1).clamp(min=0)), 0.0)
    margins = torch.maximum(low - target, target - high).clamp(min=0.0) / cumulative[:, -1:]
    margins = margins.masked_fill(high <= low, torch.inf).masked_fill(drawn == recorded_B1, 0.0)
    return drawn, logprobs.gather(-1, recorded_B1), margins


def _logprobs(logits_BV: Tensor, plan: DrawPlan) -> Tensor:
    """float32 [B, V]: log_softmax(logits / temperature)."""
    logits = logits_BV.float()
    if plan.temperature_B1 is not None:
        logits = logits / plan.temperature_B1
    return torch.log_softmax(logits, -1)


def _cumulative(logprobs_BV: Tensor, plan: DrawPlan, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative probabilities within the support, float64 [B, V], and the numbers [B, 1] that are looked up in
    them."""
    supported = (
        logprobs_BV
        if plan.top_k_B1 is None or plan.top_p_B1 is None
        else cut(logprobs_BV, plan.top_k_B1, plan.top_p_B1)
    )
    cumulative = supported.exp().cumsum(-1, dtype=torch.float64)
    return cumulative, uniforms_B[:, None] * cumulative[:, -1:]
