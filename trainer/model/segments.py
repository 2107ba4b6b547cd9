"""Boundaries of the sequences in a packed micro-batch, and their groups for SDPA.

The attention over them is in attention.py, and ranks that share a row in sequence_group.py.
Shapes: T packed tokens, P of them after padding inside groups, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.model.sequence_group import SequenceGroup

SLACK_TOKENS = 16
SLACK_SHARE = 8
"""Sequences share an SDPA call if they are shorter than its longest by at most 16 tokens or an eighth: calls have a
fixed cost on short sequences, and padding costs compute on long ones."""


@dataclass(frozen=True)
class Segments:
    """Boundaries of the sequences of one packed micro-batch; computed once, used by every layer.

    cu_seqlens: int32 [B + 1], running sum of lengths. groups: (sequences, padded length) per SDPA call.
    to_padded_P: int64, packed position of every padded slot (a padding slot repeats its sequence's first token);
    to_packed_T: int64, padded slot of every packed token; padding: int64, the slots that are padding.
    sequence_group: the ranks that share the row, each with a part of its tokens; None: this process has all of them.
    """

    cu_seqlens: torch.Tensor
    longest: int
    groups: tuple[tuple[int, int], ...]
    to_padded_P: torch.Tensor
    to_packed_T: torch.Tensor
    padding: torch.Tensor
    sequence_group: SequenceGroup | None = None

    @property
    def num_own(self) -> int:
        """Tokens of the row in this process."""
        return len(self.to_packed_T) // (1 if self.sequence_group is None else self.sequence_group.size)

    def to(self, device: torch.device) -> Segments:
        """Return a copy on `device`, or self if it is there already."""
        if self.cu_seqlens.device == device:
            return self
        return Segments(
            self.cu_seqlens.to(device, non_blocking=True),
            self.longest,
            self.groups,
            self.to_padded_P.to(device, non_blocking=True),
            self.to_packed_T.to(device, non_blocking=True),
            self.padding.to(device, non_blocking=True),
            self.sequence_group,
        )


def make_segments(lengths: Sequence[int]) -> Segments:
    """Compute the boundaries of sequences of these lengths, in this order; similar lengths share an SDPA call."""
    lengths_B = np.asarray(lengths, np.int64)
    starts_B = np.concatenate([[0], np.cumsum(lengths_B)])
    order = np.argsort(-lengths_B, kind="stable")
    groups: list[tuple[int, int]] = []
    slots: list[np.ndarray] = []
    is_token: list[np.ndarray] = []
    first = 0
    while first < len(order):
        width = int(lengths_B[order[first]])
        shortest = width - max(SLACK_TOKENS, width // SLACK_SHARE)
        last = first + 1
        while last < len(order) and lengths_B[order[last]] >= shortest:
            last += 1
        members = order[first:last]
        column = np.arange(width)[None, :]
        inside = column < lengths_B[members][:, None]
        slots.append((starts_B[members][:, None] + np.where(inside, column, 0)).ravel())
        is_token.append(inside.ravel())
        groups.append((len(members), width))
        first = last
    to_padded_P = np.concatenate(slots)
    is_token_P = np.concatenate(is_token)
    to_packed_T = np.empty(int(starts_B[-1]), np.int64)
    to_packed_T[to_padded_P[is_token_P]] = np.flatnonzero(is_token_P)
    return Segments(
        cu_seqlens=torch.from_numpy(starts_B.astype(np.int32)),
        longest=int(lengths_B.max()),
        groups=tuple(groups),
        to_padded_P=torch.from_numpy(to_padded_P),
        to_packed_T=torch.from_numpy(to_packed_T),
        padding=torch.from_numpy(np.flatnonzero(~is_token_P)),
    )
