"""Splits a packed row over the ranks of a sequence group: equal parts of its tokens, in order.

A part is a PackedSequences whose boundaries are those of the whole row, with the group: attention exchanges tokens for
heads (sequence_group.py), everything else computes on the rank's own tokens. A row is padded to a multiple of the group
by one more sequence, which nothing is predicted from; it is shorter than the group.

Shapes: T tokens of the row, S of a part, N predictions of the row, M of a part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.model.packed import PackedSequences
from trainer.model.segments import make_segments
from trainer.model.sequence_group import SequenceGroup


@dataclass(frozen=True)
class RowPart:
    """This rank's part of a row. counts: number of predictions on each rank of the group."""

    packed: PackedSequences
    counts: tuple[int, ...]
    group: SequenceGroup

    def gather(self, own_M: torch.Tensor) -> torch.Tensor:
        """Gather values of each rank's predictions: [N], in the order of the row, the same on each rank."""
        return self.group.gather(own_M, self.counts)

    def gather_tokens(self, own_S: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Gather values of each rank's tokens: those of the row's `num_tokens`, without padding."""
        return self.group.gather(own_S, [len(own_S)] * self.group.size)[:num_tokens]


def part_of(packed: PackedSequences, group: SequenceGroup, *, is_gathered: bool = False) -> RowPart:
    """Return this rank's part of `packed`, on the same device. Needs nothing from the device.

    is_gathered: the model gathers the tokens of all ranks before attention itself (tensor_split.py), which needs the
    positions of the full row and exchanges nothing.
    """
    device, num = packed.tokens_T.device, packed.num_tokens
    own = -(-num // group.size)
    missing = own * group.size - num
    segments = packed.segments if not missing else make_segments([*packed.lengths, missing]).to(device)
    first, last = group.place * own, (group.place + 1) * own
    sources_N = packed.source_places
    bounds = np.searchsorted(sources_N, np.arange(group.size + 1) * own)
    predictions = slice(int(bounds[group.place]), int(bounds[group.place + 1]))
    sources_M = sources_N[predictions] - first
    prediction_S = np.zeros(own, np.int64)
    prediction_S[sources_M] = np.arange(len(sources_M))
    is_unused_S = np.ones(own, np.bool_)
    is_unused_S[sources_M] = False
    part = replace(
        packed,
        tokens_T=_padded(packed.tokens_T[first:last], own),
        positions_T=(
            _positions(packed.positions_T, own * group.size, 0)
            if is_gathered
            else _positions(packed.positions_T[first:last], own, max(first - num, 0))
        ),
        segments=segments if is_gathered else replace(segments, sequence_group=group),
        sources_N=_on(device, sources_M),
        source_places=sources_M,
        targets_N=packed.targets_N[predictions],
        sequence_N=packed.sequence_N[predictions],
        prediction_T=_on(device, prediction_S),
        unused=_on(device, np.flatnonzero(is_unused_S)),
        routes_TLK=None if packed.routes_TLK is None else _padded(packed.routes_TLK[first:last], own, -1),
    )
    return RowPart(part, tuple(int(count) for count in np.diff(bounds)), group)


def _padded(values_S: torch.Tensor, length: int, value: int = 0) -> torch.Tensor:
    """Append `value`; every vocabulary has an embedding of token 0."""
    return torch.cat([values_S, values_S.new_full((length - len(values_S), *values_S.shape[1:]), value)])


def _positions(positions: torch.Tensor, length: int, start: int) -> torch.Tensor:
    """Append the positions of this rank's part of the padding sequence, which begin at `start`."""
    num = length - len(positions)
    padding = torch.arange(start, start + num, device=positions.device)
    return torch.cat([positions, padding]) if num else positions


def _on(device: torch.device, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
