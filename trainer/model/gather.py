"""Selects rows by index, with a backward pass that also gathers.

Overlapping gradients are not supported; torch's `index_select` handles those by scattering row by row, which on a CPU
takes tens of times as long as the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch


def gather_rows(
    x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, absent: torch.Tensor | None
) -> torch.Tensor:
    """Return `x[index]`, if every row of `x` receives a gradient from at most one row of the result.

    inverse [rows of x]: the row of the result whose gradient each row of x gets; absent: rows of x without a gradient
    (their entry of `inverse` is not used). Rows of the result that are not in `inverse` must carry no gradient.
    """
    result: torch.Tensor = _GatherRows.apply(x, index, inverse, absent)
    return result


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, absent: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.inverse, ctx.absent = inverse, absent
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if not len(grads[0]):  # a rank of a sequence group may predict nothing
            return grads[0].new_zeros(len(ctx.inverse), *grads[0].shape[1:]), None, None, None
        grad_x = grads[0].index_select(0, ctx.inverse)
        if ctx.absent is not None and len(ctx.absent):
            grad_x.index_fill_(0, ctx.absent, 0.0)
        return grad_x, None, None, None
