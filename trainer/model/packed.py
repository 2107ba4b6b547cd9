"""Several sequences concatenated in one row, without padding, and which of their tokens are to be predicted.
Shapes: T packed tokens, B sequences, N tokens to predict (those of the loss mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainer.model.segments import Segments, make_segments


@dataclass(frozen=True)
class PackedSequences:
    """One packed micro-batch.

    tokens_T, positions_T: int64. Prediction n is of token `targets_N[n]`, computed from the hidden state at packed
    position `sources_N[n]` (the previous one), and belongs to sequence `sequence_N[n]`; predictions are in packed
    order. prediction_T / unused: the inverse of sources_N, for the gradient (see gather_rows). source_places: sources_N
    on the host. routes_TLK: int32, the experts that an engine recorded for each token in each layer, -1 where it
    recorded none; None: there are none.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    segments: Segments
    lengths: tuple[int, ...]
    sources_N: torch.Tensor
    targets_N: torch.Tensor
    sequence_N: torch.Tensor
    prediction_T: torch.Tensor
    unused: torch.Tensor
    source_places: np.ndarray
    routes_TLK: torch.Tensor | None = None

    @staticmethod
    def build(
        tokens: Sequence[np.ndarray],
        loss_masks: Sequence[np.ndarray],
        routes: Sequence[np.ndarray | None] | None = None,
    ) -> PackedSequences:
        """Pack `tokens` (integer arrays) with their `loss_masks` (bool arrays of the same lengths), in this order.

        routes: recorded experts of each sequence (`Trajectory.routed_experts`), if they are replayed.

        Raises ValueError if the first token of a sequence is to be predicted (no token precedes it), if a mask has
        another length than its tokens, or if no token is to be predicted.
        """
        assert len(tokens) == len(loss_masks) > 0
        for tokens_T, mask_T in zip(tokens, loss_masks, strict=True):
            if len(tokens_T) != len(mask_T) or not len(tokens_T):
                raise ValueError(
                    f"tokens and loss mask must have the same length, greater than 0; got {len(tokens_T)} tokens and a "
                    f"loss mask of length {len(mask_T)}"
                )
            if mask_T[0]:
                raise ValueError(
                    "the first token of a sequence cannot be predicted, so a prompt must have at least one token"
                )
        lengths = tuple(len(tokens_T) for tokens_T in tokens)
        flat_T = np.concatenate(list(tokens)).astype(np.int64)
        mask_T = np.concatenate(list(loss_masks)).astype(np.bool_)
        positions_T = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
        predicted_N = np.flatnonzero(mask_T)
        if not len(predicted_N):
            raise ValueError("the loss masks select no tokens")
        sources_N = predicted_N - 1
        prediction_T = np.zeros(len(flat_T), np.int64)
        prediction_T[sources_N] = np.arange(len(sources_N))
        is_unused_T = np.ones(len(flat_T), np.bool_)
        is_unused_T[sources_N] = False
        sequence_T = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        return PackedSequences(
            tokens_T=torch.from_numpy(flat_T),
            positions_T=torch.from_numpy(positions_T),
            segments=make_segments(lengths),
            lengths=lengths,
            sources_N=torch.from_numpy(sources_N),
            targets_N=torch.from_numpy(flat_T[predicted_N]),
            sequence_N=torch.from_numpy(sequence_T[predicted_N]),
            prediction_T=torch.from_numpy(prediction_T),
            unused=torch.from_numpy(np.flatnonzero(is_unused_T)),
            source_places=sources_N,
            routes_TLK=None if routes is None else _joined_routes(routes, lengths),
        )

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens."""
        return len(self.tokens_T)

    @property
    def num_predictions(self) -> int:
        """N, the number of predictions."""
        return len(self.targets_N)

    def subset(self, members: Sequence[int]) -> tuple[PackedSequences, np.ndarray]:
        """Pack some of the sequences, on the host; also returns the places [M] of their predictions in this pack."""
        lengths_B = np.asarray(self.lengths)
        starts_B = np.cumsum(lengths_B) - lengths_B
        tokens_T, sequence_N = self.tokens_T.cpu().numpy(), self.sequence_N.cpu().numpy()
        is_target_T = np.zeros(self.num_tokens, np.bool_)
        is_target_T[self.sources_N.cpu().numpy() + 1] = True
        spans = [slice(starts_B[one], starts_B[one] + lengths_B[one]) for one in members]
        packed = PackedSequences.build([tokens_T[span] for span in spans], [is_target_T[span] for span in spans])
        if self.routes_TLK is not None:
            packed = replace(packed, routes_TLK=torch.cat([self.routes_TLK[span] for span in spans]))
        return packed, np.concatenate([np.flatnonzero(sequence_N == one) for one in members])

    def to(self, device: torch.device) -> PackedSequences:
        """Return a copy on `device`, or self if it is there already."""
        if self.tokens_T.device == device:
            return self
        tensors: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, segments=self.segments.to(device), **tensors)


def _joined_routes(routes: Sequence[np.ndarray | None], lengths: Sequence[int]) -> torch.Tensor | None:
    """Concatenate recorded experts; the last token of a sequence and sequences without a record get -1."""
    known = [one for one in routes if one is not None]
    if not known:
        return None
    joined_TLK = np.full((sum(lengths), *known[0].shape[1:]), -1, np.int32)
    start = 0
    for one, length in zip(routes, lengths, strict=True):
        if one is not None:
            joined_TLK[start : start + length - 1] = one
        start += length
    return torch.from_numpy(joined_TLK)
