"""Stands in for the channel between ranks: every rank's copy is in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.gathered import gathered
from trainer.host_copy import Copied, Place


class LocalChannel:
    """A PartChannel of rank 0; `copies` are those of the other ranks."""

    def __init__(self, *copies: Copied) -> None:
        self._copies = dict(enumerate(copies, 1))
        self.size = 1 + len(copies)
        self.pending: dict[int, list[Sequence[tuple[int, int]]]] = {rank: [] for rank in self._copies}
        """Messages that were asked for and not received."""
        self.ended: set[int] = set()
        """Ranks that were notified that nothing more is needed."""
        self.pieces: list[int] = []
        """Bytes of each message that was received."""

    def layout(self, rank: int) -> Sequence[Place]:
        return self._copies[rank].places

    def ask(self, rank: int, messages: Sequence[Sequence[tuple[int, int]]]) -> None:
        assert rank not in self.ended
        assert not self.pending[rank], "asked for more before everything was received"
        self.pending[rank] = list(messages)
        if not messages:
            self.ended.add(rank)

    def receive(self, rank: int, out_U: torch.Tensor) -> None:
        buffer_U = self._copies[rank].buffer_U
        message_U = torch.cat([buffer_U[start : start + size] for start, size in self.pending[rank].pop(0)])
        assert len(out_U) == len(message_U)
        out_U.copy_(message_U)
        self.pieces.append(len(message_U))


def assemble(own: Copied, *others: Copied, bucket_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    """All tensors of the copies of several ranks."""
    channel: Any = LocalChannel(*others) if others else None
    with gathered(own, channel, bucket_bytes) as tensors:
        return dict(tensors)
