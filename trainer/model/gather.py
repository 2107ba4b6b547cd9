"""Rows taken by index, with a backward pass that gathers too.

Owns: `gather_rows`. Refuses: overlapping gradients; torch's own `index_select` serves those, by scattering row by row,
which on a CPU costs tens of times the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch


def gather_rows(
    x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, absent: torch.Tensor | None
) -> torch.Tensor:
    """`x[index]`, where every row of `x` receives a gradient from at most one row of the result.

    inverse [rows of x]: the result's row that gives the gradient of each row of x; absent: rows of x that get none
    (their entry of `inverse` is not used). Rows of the result that `inverse` does not name must carry no gradient.
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
        grad_x = grads[0].index_select(0, ctx.inverse)
        if ctx.absent is not None and len(ctx.absent):
            grad_x.index_fill_(0, ctx.absent, 0.0)
        return grad_x, None, None, None
