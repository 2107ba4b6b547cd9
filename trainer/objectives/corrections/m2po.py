"""Token mask by the second moment of the whole step (M2PO, arXiv 2510.01161, section 4, algorithm 1).

With d the log-prob at the start of the step minus the behaviour log-prob, the tokens with the largest d^2 are dropped
until the mean of d^2 over the others is below the bound. Unlike a window it drops nothing while the step as a whole is
near the policy that sampled it, even if single tokens are far from it.

The tokens of the step are those of all ranks. The threshold is found by bisection over the bits of a float64, which
order non-negative numbers like the numbers themselves. Equal values are dropped together.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Correction, SumOverRanks, TokenInputs

if TYPE_CHECKING:
    import torch

INFINITY_BITS = 0x7FF << 52


class Options(Settings):
    """Bound of the second moment."""

    max_second_moment: float = Field(0.04, gt=0)
    """The mean of d^2 over the kept tokens is below it."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep tokens up to the threshold of the step."""
    assert tokens.drift_N is not None
    return tokens.drift_N.double().square() <= tokens.step["m2po"]["largest"]


def statistics(parts: Sequence[TokenInputs], sum_over_ranks: SumOverRanks, options: Options) -> Mapping[str, float]:
    """Find the largest d^2 that is kept."""
    squares = [part.drift_N.double().square() for part in parts if part.drift_N is not None]
    bits = 0
    for place in reversed(range(63)):
        largest = _as_float(bits | 1 << place)
        kept = [square_N[square_N <= largest] for square_N in squares]
        own = [sum(float(square_K.sum()) for square_K in kept), sum(len(square_K) for square_K in kept)]
        total, count = sum_over_ranks(own)
        if total < options.max_second_moment * count or not count:
            bits |= 1 << place
    return {"largest": _as_float(bits)}


def _as_float(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", min(bits, INFINITY_BITS)))[0]
    return number


CORRECTION = Correction(name="m2po", factor=factor, options=Options, statistics=statistics)
