"""The trainer's ranks as one group: how they find each other, how rank 0 leads the others, how the group ends.

Owns: the process group and its deadlines, orders and batches from rank 0 to the others, parts of checkpoints back, sums
over ranks. Refuses: what an order does (training.py, follower.py), how a model is spread over ranks (backends/).

Four groups of torch.distributed, so that nobody waits in another's queue:
  compute   the backend's collectives and sums over ranks: gloo on a CPU, nccl on GPUs; deadline `rank_timeout_s`
  orders    what to do next, from rank 0; used by the compute thread
  batches   the samples of the next step, from rank 0; used by the packing thread, in the shadow of the running step
  saves     every rank's part of a checkpoint, to rank 0; used by the thread that writes it, in the shadow likewise
The last three are gloo always; the deadline of orders and batches has room for a trainer that waits for its next batch.

A rank that dies closes its sockets: on gloo every other rank fails at once in what it waits for, and says so as
`RankLost`. A rank that hangs is found by the deadline. nccl knows no closed sockets; there the launcher sees it first.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_like.config import ProcessSpec
from areal_like.errors import OperationError
from areal_like.process import report_end
from areal_like.wire.encoding import decode, encode
from areal_like.wire.messages import Batch, BatchSample
from trainer.host_copy import Place

LISTEN_BACKLOG = 4096
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|socket|recv|remote process", re.IGNORECASE
)
"""What torch.distributed says of a peer that is gone; its errors have no type of their own."""


class RankLost(OperationError):
    """Another rank of the trainer is gone, or hangs: this one cannot go on. Its own log has the reason."""


class MeetingPlaceTaken(OperationError):
    """Rank 0 cannot listen where the ranks were to meet. A trainer that starts again is given another place."""


class Order(enum.IntEnum):
    """What rank 0 tells the others to do together with it."""

    STEP = 0
    PUBLISH = 1
    SAVE = 2
    EXPORT = 3
    END = 4


class Ranks:
    """This process among the trainer's ranks. `Ranks.alone()` is a group of one without any process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._orders: dist.ProcessGroup | None = None
        self._batches: dist.ProcessGroup | None = None
        self._saves: dist.ProcessGroup | None = None
        self._sending = threading.Lock()
        """The end of batches comes from another thread than batches do, and not into the middle of one."""

    @staticmethod
    def alone(device: str | torch.device = "cpu") -> Ranks:
        """One process, no group."""
        return Ranks(0, 1, torch.device(device))

    @staticmethod
    def join(spec: ProcessSpec, device: str, *, timeout_s: float, order_timeout_s: float) -> Ranks:
        """Meet the other ranks at `spec.ranks_address`. Raises RankLost when they do not come within `timeout_s`."""
        ranks = Ranks(spec.rank, spec.num_ranks, own_device(device, spec))
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        deadline, order_deadline = (datetime.timedelta(seconds=s) for s in (timeout_s, order_timeout_s))
        with peer_errors_as_rank_lost("meeting the other ranks"):
            store = _store(spec, deadline)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo",
                store=store,
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=deadline,
            )
            ranks._orders = dist.new_group(backend="gloo", timeout=order_deadline)
            ranks._batches = dist.new_group(backend="gloo", timeout=order_deadline)
            ranks._saves = dist.new_group(backend="gloo", timeout=deadline)
        return ranks

    @property
    def is_leader(self) -> bool:
        """Rank 0: it talks to the controller and writes files."""
        return self.rank == 0

    @property
    def has_group(self) -> bool:
        """torch.distributed is up (also a group of one may have it: its backend asks for one)."""
        return self._orders is not None

    # ------------------------------------------------------------ orders

    def tell(self, order: Order) -> None:
        """Rank 0: all ranks do `order` now. Nothing to tell where there is nobody."""
        if self.size > 1 and self.is_leader:
            with peer_errors_as_rank_lost(f"sending the other ranks the order to {order.name.lower()}"):
                dist.broadcast(torch.tensor([int(order)]), 0, group=self._orders)

    def hear(self) -> Order:
        """Other ranks: the next order. Raises RankLost when rank 0 is gone or says nothing until the deadline."""
        assert not self.is_leader
        number = torch.zeros(1, dtype=torch.int64)
        with peer_errors_as_rank_lost("waiting for rank 0"):
            dist.broadcast(number, 0, group=self._orders)
        return Order(int(number))

    # ------------------------------------------------------------ batches

    def send_batch(self, samples: Sequence[BatchSample], step: int, lineage: str) -> None:
        """Rank 0: the samples of `step` to all others; they must be in `next_batch`, or come to it."""
        if self.size == 1 or not self.is_leader:
            return
        frames = encode(Batch(step=step, lineage=lineage, samples=tuple(samples)))
        self._send([np.frombuffer(frame, np.uint8) for frame in frames])

    def end_batches(self) -> None:
        """Rank 0: there will be no more batches."""
        if self.size > 1 and self.is_leader:
            self._send([])

    def next_batch(self) -> Batch | None:
        """Other ranks: the next batch, or None after the last."""
        assert not self.is_leader
        with peer_errors_as_rank_lost("waiting for a batch of rank 0"):
            head = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(head, 0, group=self._batches)
            if not int(head):
                return None
            sizes = torch.zeros(int(head), dtype=torch.int64)
            dist.broadcast(sizes, 0, group=self._batches)
            data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._batches)
        frames = [memoryview(part.numpy().data).cast("B") for part in data.split(sizes.tolist())]
        batch = decode(frames, frozenset({Batch}))
        assert isinstance(batch, Batch)
        return batch

    def _send(self, frames: Sequence[np.ndarray]) -> None:
        with self._sending, peer_errors_as_rank_lost("sending a batch to the other ranks"):
            dist.broadcast(torch.tensor([len(frames)]), 0, group=self._batches)
            if frames:
                dist.broadcast(torch.tensor([len(frame) for frame in frames]), 0, group=self._batches)
                dist.broadcast(torch.from_numpy(np.concatenate(list(frames))), 0, group=self._batches)

    # ------------------------------------------------------------ parts of a checkpoint

    def send_part(self, places: Sequence[Place], buffer_U: torch.Tensor) -> None:
        """Other ranks: this rank's part, to rank 0, which is in `receive_parts` or comes to it."""
        layout = torch.frombuffer(bytearray(msgspec.msgpack.encode(places)), dtype=torch.uint8)
        with peer_errors_as_rank_lost("sending a part of a checkpoint to rank 0"):
            dist.send(torch.tensor([len(layout), len(buffer_U)]), 0, group=self._saves)
            dist.send(layout, 0, group=self._saves)
            dist.send(buffer_U, 0, group=self._saves)

    def receive_parts(self) -> Iterator[tuple[Sequence[Place], torch.Tensor]]:
        """Rank 0: the part of each other rank, one after the other; nothing where there is nobody."""
        for rank in range(1, self.size):
            with peer_errors_as_rank_lost(f"waiting for rank {rank}'s part of a checkpoint"):
                sizes = torch.zeros(2, dtype=torch.int64)
                dist.recv(sizes, rank, group=self._saves)
                layout, buffer_U = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
                dist.recv(layout, rank, group=self._saves)
                dist.recv(buffer_U, rank, group=self._saves)
            yield msgspec.msgpack.decode(layout.numpy().tobytes(), type=tuple[Place, ...]), buffer_U

    # ------------------------------------------------------------ numbers of all ranks

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place; the same on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place; the same on each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place; the same on each."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def _reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(values, how)
        return values

    def wait_for_all(self, doing: str) -> None:
        """Until every rank has called this; it uses no device. `doing`: for the error. Raises RankLost."""
        if self.size > 1:
            with peer_errors_as_rank_lost(doing):
                dist.all_reduce(torch.zeros(1), group=self._orders)

    def close(self) -> None:
        """Leave the group; all ranks do."""
        if self.has_group:
            self._orders = self._batches = self._saves = None
            dist.destroy_process_group()


def leave_at_once(error: BaseException) -> NoReturn:
    """End this process as `areal_like.process` would, but without waiting for threads inside collectives.

    They wait for peers that are gone, and an interpreter that ends under them is aborted.
    """
    status = report_end(error)
    sys.stdout.flush()
    os._exit(status)


def own_device(device: str, spec: ProcessSpec) -> torch.device:
    """Device of a rank: the same CPU, or from the named GPU upwards one each, or the only one it is shown."""
    first = torch.device(device)
    offset = 0 if spec.has_own_gpus else spec.rank
    return first if first.type != "cuda" else torch.device("cuda", (first.index or 0) + offset)


@contextlib.contextmanager
def peer_errors_as_rank_lost(what: str) -> Iterator[None]:
    """Errors of torch.distributed about a peer become RankLost; all others pass."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _LOST.search(str(error)):
            raise
        text = " ".join(str(error).split())[:300]
        raise RankLost(f"the other ranks of the trainer were lost while {what} ({text})") from error


def _store(spec: ProcessSpec, timeout: datetime.timedelta) -> dist.Store:
    """The meeting point: a file for ranks of one machine, which other users cannot open, or a port.

    There rank 0 listens on exactly the address given; torch alone would listen on every interface.
    """
    place = spec.ranks_address
    is_file = place.startswith("file://")
    host, _, port = place.removeprefix("tcp://").rpartition(":")
    if (
        (is_file or host.startswith("127."))
        and "GLOO_SOCKET_IFNAME" not in os.environ
        and Path("/sys/class/net/lo").exists()
    ):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if is_file:
        store = dist.FileStore(place.removeprefix("file://"), spec.num_ranks)
        store.set_timeout(timeout)
        return store
    if spec.rank:
        return dist.TCPStore(host, int(port), spec.num_ranks, is_master=False, timeout=timeout)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise MeetingPlaceTaken(f"the ranks cannot meet at {host}:{port}: {error.strerror}") from error
    listener.listen(LISTEN_BACKLOG)
    return dist.TCPStore(
        host, int(port), spec.num_ranks, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
