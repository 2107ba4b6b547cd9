"""Moves the bytes of every rank's copy (host_copy.py) to rank 0, in pieces, over a process group of its own.

Rank 0 asks for what it needs next, so that it holds one piece at a time: first it receives the layout of the other
rank's copy, then it sends lists of byte ranges, which the other rank sends, several in a message, until an empty list.
What rank 0 does with them is in gathered.py.

All methods block, and belong on a thread that does not compute. Each channel is used by one thread of a rank at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from trainer.host_copy import Copied, Place
from trainer.peer_errors import peer_errors_as_rank_lost

Span = tuple[int, int]
"""Offset in a rank's buffer, and number of bytes."""


class PartChannel:
    """The channel between rank 0 and each other rank."""

    def __init__(self, group: dist.ProcessGroup, size: int, what: str) -> None:
        """what: the content, for errors."""
        self._group, self.size, self._what = group, size, what

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for the thread that uses this channel."""
        return self._group

    # ------------------------------------------------------------ other ranks

    def serve(self, copied: Copied) -> None:
        """Send what rank 0 asks for, until it needs no more. Raises RankLost."""
        copied.wait()
        layout = torch.frombuffer(bytearray(msgspec.msgpack.encode(copied.places)), dtype=torch.uint8)
        with peer_errors_as_rank_lost(f"sending a part of {self._what} to rank 0"):
            dist.send(torch.tensor([len(layout)]), 0, group=self._group)
            dist.send(layout, 0, group=self._group)
            while True:
                number = torch.zeros(1, dtype=torch.int64)
                dist.recv(number, 0, group=self._group)
                if not int(number):
                    return
                table = torch.zeros(int(number), 3, dtype=torch.int64)
                dist.recv(table, 0, group=self._group)
                for _, rows in itertools.groupby(table.tolist(), key=lambda row: row[0]):
                    spans = [copied.buffer_U[offset : offset + num_bytes] for _, offset, num_bytes in rows]
                    dist.send(spans[0] if len(spans) == 1 else torch.cat(spans), 0, group=self._group)

    def next_call(self) -> int:
        """Wait for the number that rank 0 sends with `call`. Raises RankLost."""
        number = torch.zeros(1, dtype=torch.int64)
        with peer_errors_as_rank_lost("waiting for rank 0"):
            dist.recv(number, 0, group=self._group)
        return int(number)

    # ------------------------------------------------------------ rank 0

    def call(self, number: int) -> None:
        """Send a number to every other rank, which waits for it in `next_call`. Raises RankLost."""
        for rank in range(1, self.size):
            with peer_errors_as_rank_lost(f"calling rank {rank}"):
                dist.send(torch.tensor([number]), rank, group=self._group)

    def layout(self, rank: int) -> Sequence[Place]:
        """Receive where each tensor's part is in the copy of `rank`. Raises RankLost."""
        with self._waiting(rank):
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank, group=self._group)
            layout = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(layout, rank, group=self._group)
        return msgspec.msgpack.decode(layout.numpy().tobytes(), type=tuple[Place, ...])

    def ask(self, rank: int, messages: Sequence[Sequence[Span]]) -> None:
        """Ask `rank` for byte ranges, to be received in this order, in one message each; for none: it needs to serve no
        longer."""
        table = [(place, *span) for place, spans in enumerate(messages) for span in spans]
        with self._waiting(rank):
            dist.send(torch.tensor([len(table)]), rank, group=self._group)
            if table:
                dist.send(torch.tensor(table, dtype=torch.int64), rank, group=self._group)

    def receive(self, rank: int, out_U: torch.Tensor) -> None:
        """Receive the next message of `rank` into `out_U`, which has its size. Raises RankLost."""
        with self._waiting(rank):
            dist.recv(out_U, rank, group=self._group)

    def _waiting(self, rank: int) -> contextlib.AbstractContextManager[None]:
        return peer_errors_as_rank_lost(f"waiting for rank {rank}'s part of {self._what}")
