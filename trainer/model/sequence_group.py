"""The ranks that share a packed row, and their exchanges: sequence parallelism by all-to-all (Ulysses).

Each rank of the group has an equal part of the row's tokens, in order. Before attention the ranks exchange parts of
tokens for parts of heads: afterwards each has all tokens of some heads (DeepSpeed-Ulysses, arXiv 2309.14509, section
3). All methods are collective over the group, with a gradient, and all ranks of the group call them in the same order.

How a row is split is defined in row_parts.py, and which ranks form a group in trainer/ranks.py.
Shapes: T tokens of the whole row, S of one rank's part (T = N S), N ranks, H query heads, K key/value heads, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from areal_like.errors import UserError


@dataclass(frozen=True)
class SequenceGroup:
    """A group of `size` ranks that share each packed row, and this rank's place in it (0 to size - 1)."""

    place: int
    size: int
    group: dist.ProcessGroup

    def to_heads(
        self, query_SHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange this rank's tokens of all heads for all tokens of its heads: [T, H / N, D] and keys and values.

        Query heads are split in order. Key/value heads are repeated, if needed, so that each rank has those of its
        query heads: lcm(K, N) of them divide the query heads if K and N do. One message for all three.
        """
        check_heads(query_SHD.shape[1], self.size)
        repeats = math.lcm(key_SKD.shape[1], self.size) // key_SKD.shape[1]
        if repeats > 1:
            key_SKD, value_SKD = (x.repeat_interleave(repeats, 1) for x in (key_SKD, value_SKD))
        parts = [x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(1) for x in (query_SHD, key_SKD, value_SKD)]
        sent = torch.cat(parts, 1)
        received = _Exchange.apply(sent, self.group)
        query, key, value = (
            part.reshape(self.size * len(x), x.shape[1] // self.size, x.shape[2])
            for part, x in zip(
                received.split([part.shape[1] for part in parts], 1), (query_SHD, key_SKD, value_SKD), strict=True
            )
        )
        return query, key, value

    def to_tokens(self, out_ThD: torch.Tensor) -> torch.Tensor:
        """Exchange all tokens of this rank's heads [T, H / N, D] for its tokens of all heads [S, H, D]."""
        received = _Exchange.apply(out_ThD.unflatten(0, (self.size, -1)), self.group)
        tokens_SHD: torch.Tensor = received.transpose(0, 1).flatten(1, 2)
        return tokens_SHD

    def gather(self, own_M: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Concatenate the values of all ranks, `counts` of each, in the order of their places.

        The gradient of this rank's values is that of its part of the result: every rank must compute the same loss from
        the result, and only counts it once.
        """
        gathered: torch.Tensor = _Gather.apply(own_M, tuple(counts), self)
        return gathered


def check_heads(heads: int, size: int) -> None:
    """Raise UserError if a group of `size` ranks cannot share `heads` query heads equally."""
    if heads % size:
        able = ", ".join(str(one) for one in range(2, heads + 1) if heads % one == 0) or "1"
        raise UserError(
            f"{size} ranks cannot share the model's {heads} attention heads equally",
            where="trainer.sequence_parallel",
            remedy=f"use {able}",
        )


class _Exchange(torch.autograd.Function):
    """All-to-all of the N parts [N, ...] of a tensor; its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts_N, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(parts_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts_N = parts_N.contiguous()
    received_N = torch.empty_like(parts_N)
    dist.all_to_all_single(received_N, parts_N, group=group)
    return received_N


class _Gather(torch.autograd.Function):
    """Gathers parts of different lengths, padded to the longest for the collective."""

    @staticmethod
    def forward(ctx: Any, own_M: torch.Tensor, counts: tuple[int, ...], group: SequenceGroup) -> torch.Tensor:
        assert len(own_M) == counts[group.place]
        ctx.counts, ctx.place = counts, group.place
        longest = max(counts)
        padded = own_M.new_zeros(longest)
        padded[: len(own_M)] = own_M
        gathered = own_M.new_empty(group.size * longest)
        dist.all_gather_into_tensor(gathered, padded, group=group.group)
        parts = gathered.split(longest)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].split(ctx.counts)[ctx.place].contiguous(), None, None
