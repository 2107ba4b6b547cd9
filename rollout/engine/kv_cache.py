"""Preallocated keys and values of all slots, and attention of one new token per row over them.

The order of rows is in row_order.py.

Rows 0..B-1 take part in a step: the scheduler keeps the active rows at the front, so no row is gathered here.

Legend: B rows of a step, N prompts, M tokens, K key/value heads, G query heads per key/value head,
D head size, C context, T positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine.row_order import ONE_BLOCK, Block, blocks_of, cost_of
from rollout.engine.shape import ModelShape

COPY_BYTES = 256 << 20
CPU_CALL_BYTES = 256 << 10
"""Number of keys and values that a CPU core reads in about the time of one more call. On an accelerator all rows are
attended in one call; the cost of several calls has not been measured there."""


class StepPlan(NamedTuple):
    """Data that all layers of one decode step share: the position of the new token, and the attended positions."""

    num_rows: int
    blocks: list[Block]
    places: Tensor
    biases: list[Tensor]
    """Mask of each block, [rows, 1, 1, span]."""


class KVCache:
    """Buffers [layers, slots, K, C, D] for keys and for values."""

    def __init__(
        self, shape: ModelShape, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_heads, self.head_size, self.max_context = shape.num_key_heads, shape.head_size, max_context
        dims = (shape.num_layers, num_slots, self.num_heads, max_context, self.head_size)
        # Zeros, not empty: positions after a row's end are masked, and 0 * NaN would still be NaN.
        self._keys = torch.zeros(dims, dtype=dtype, device=device)
        self._values = torch.zeros(dims, dtype=dtype, device=device)
        self._layers = list(zip(self._keys.unbind(0), self._values.unbind(0), strict=True))
        flat = (shape.num_layers, num_slots * self.num_heads * max_context, self.head_size)
        self._flat_layers = list(zip(self._keys.view(flat).unbind(0), self._values.view(flat).unbind(0), strict=True))
        self._positions_C = torch.arange(max_context, device=device)
        heads = torch.arange(num_slots * self.num_heads, device=device)
        self._head_starts = (heads * max_context).view(num_slots, self.num_heads)
        self._open = torch.zeros((), dtype=dtype, device=device)
        self._shut = torch.full((), -math.inf, dtype=dtype, device=device)
        bytes_per_token = 2 * self.num_heads * self.head_size * self._keys.element_size()
        self.call_tokens = CPU_CALL_BYTES // bytes_per_token if device.type == "cpu" else ONE_BLOCK
        """Number of padded tokens that cost as much as one more call."""

    @property
    def tokens_per_copy(self) -> int:
        """Number of padded tokens whose keys and values of all layers `take` may copy."""
        return max(1, COPY_BYTES // self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self._keys[:, 0, :, 0].numel() * self._keys.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values of all slots."""
        return self._keys.nbytes + self._values.nbytes

    def places(self, rows_M: Tensor, positions_M: Tensor) -> Tensor:
        """Indices at which `write` stores M tokens, for these positions of these rows."""
        return (self._head_starts.index_select(0, rows_M) + positions_M[:, None]).view(-1)

    def blocks(self, lengths_B: np.ndarray) -> list[Block]:
        """Blocks in which rows of these lengths are attended, in this order."""
        return blocks_of(lengths_B, self.max_context, self.call_tokens)

    def cost(self, lengths_B: np.ndarray) -> int:
        """Cost of attending these blocks: number of keys of a layer that are read."""
        return cost_of(self.blocks(lengths_B), self.call_tokens)

    def plan(self, positions_B: Tensor, lengths_B: np.ndarray) -> StepPlan:
        """Prepare a step that writes at `positions_B` and attends positions 0..position of each row.

        lengths_B: positions + 1, on the host.
        """
        num_rows, blocks = len(positions_B), self.blocks(lengths_B)
        span_T = blocks[0].span
        places = (self._head_starts[:num_rows] + positions_B[:, None]).view(-1)
        beyond = self._positions_C[:span_T] > positions_B[:, None]
        bias = torch.where(beyond, self._shut, self._open).view(num_rows, 1, 1, span_T)
        biases = [bias[start:stop, :, :, :span] for start, stop, span in blocks]
        return StepPlan(num_rows, blocks, places, biases)

    def write(self, layer: int, places: Tensor, key_MKD: Tensor, value_MKD: Tensor) -> None:
        """Write the keys and values of M tokens."""
        flat_keys, flat_values = self._flat_layers[layer]
        flat_keys.index_copy_(0, places, key_MKD.reshape(-1, self.head_size))
        flat_values.index_copy_(0, places, value_MKD.reshape(-1, self.head_size))

    def read(self, layer: int, rows_N: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, T, D] of the first `num_tokens` positions of some rows, copied."""
        keys, values = self._layers[layer]
        return keys[:, :, :num_tokens].index_select(0, rows_N), values[:, :, :num_tokens].index_select(0, rows_N)

    def attend(self, layer: int, plan: StepPlan, query_BKGD: Tensor) -> Tensor:
        """Attention of one new token per row, whose keys and values are written; returns [B, K * G * D].

        The G query heads of a key head are treated as G query positions: grouped attention without repeating keys.
        """
        keys, values = self._layers[layer]
        parts = [
            F.scaled_dot_product_attention(
                query_BKGD[start:stop], keys[start:stop, :, :span], values[start:stop, :, :span], attn_mask=bias
            )
            for (start, stop, span), bias in zip(plan.blocks, plan.biases, strict=True)
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.reshape(plan.num_rows, -1)

    def take(self, rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Copy keys and values of the first `num_tokens` positions of these rows, for all layers.

        index_select is not used, because on a CPU it first copies its whole input.
        """
        return self._keys[:, :, :, :num_tokens][:, rows], self._values[:, :, :, :num_tokens][:, rows]

    def put(self, rows: Tensor, taken: tuple[Tensor, Tensor]) -> None:
        """Store a result of `take` as the first tokens of these rows."""
        for buffer, part in zip((self._keys, self._values), taken, strict=True):
            buffer[:, :, :, : part.shape[3]][:, rows] = part

    def save_row(self, row: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Copy keys and values [layers, K, T, D] of the first `num_tokens` positions of one row."""
        return self._keys[:, row, :, :num_tokens].clone(), self._values[:, row, :, :num_tokens].clone()

    def load_row(self, row: int, saved: tuple[Tensor, Tensor], num_tokens: int) -> None:
        """Store the first `num_tokens` of a result of `save_row` as the first tokens of a row."""
        for buffer, part in zip((self._keys, self._values), saved, strict=True):
            buffer[:, row, :, :num_tokens] = part[:, :, :num_tokens]

    def clear_rows(self, rows: Tensor) -> None:
        """Zero whole rows (after non-finite numbers were stored)."""
        self._keys.index_fill_(1, rows, 0.0)
        self._values.index_fill_(1, rows, 0.0)
