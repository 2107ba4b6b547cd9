"""The trainer's ranks as one group: rendezvous, orders from rank 0 to the others, and shutdown.

It contains the process groups and their deadlines, orders and batches from rank 0 to the others, and sums over ranks.
Orders are executed in training.py and follower.py; how a model is distributed over ranks is defined in backends/;
parts of versions and checkpoints go to rank 0 through part_channel.py.

There are five groups of torch.distributed, so that no operation waits in the queue of another:
  compute   the backend's collectives and sums over ranks: gloo on a CPU, nccl on GPUs; deadline `rank_timeout_s`
  orders    what to do next, from rank 0; used by the compute thread
  batches   the samples of the next step, from rank 0; used by the packing thread, in the background of a step
  versions  every rank's part of a version, to rank 0; used by the thread that writes it, in the background of a step
  saves     the same for a checkpoint
The last four always use gloo. The deadline of orders allows for a trainer that waits for its next batch, and that of
batches and versions also for a step, because they are awaited in its background. A rank that hangs is found by the
deadlines of the others.
With `sequence_parallel`, consecutive ranks also form sequence groups, each with a group like `compute` of its own; with
`fsdp.replicas`, the ranks of a replica do, and those that have the same part of each replica. With `tensor_parallel`
consecutive ranks are a sequence group too.

A rank that dies closes its sockets: with gloo every other rank fails at once in the operation it waits for, and raises
`RankLost`. A rank that hangs is found by the deadline. nccl does not notice closed sockets; there the launcher detects
it first.
"""

from __future__ import annotations

import datetime
import enum
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_like.errors import OperationError
from areal_like.process import report_end
from areal_like.wire.encoding import decode, encode
from areal_like.wire.messages import Batch, BatchSample
from trainer.model.sequence_group import SequenceGroup
from trainer.part_channel import PartChannel
from trainer.peer_errors import peer_errors_as_rank_lost

LISTEN_BACKLOG = 4096
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Dimensions of a mesh."""
LONGEST_STEP_S = 14400.0
"""Time that a step may take in addition to the wait for its batch."""


class MeetingPlaceTaken(OperationError):
    """Rank 0 cannot listen on the rendezvous address. A trainer that restarts receives another address."""


class Order(enum.IntEnum):
    """Operations that rank 0 orders the others to run together with it."""

    STEP = 0
    PUBLISH = 1
    SAVE = 2
    EXPORT = 3
    END = 4


class RankSpec(Protocol):
    """The place of a process among the ranks. has_own_gpus: only its GPUs are visible to it."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def ranks_address(self) -> str: ...
    @property
    def has_own_gpus(self) -> bool: ...


class Ranks:
    """This process among the trainer's ranks. `Ranks.alone()` is a group of one without a process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._orders: dist.ProcessGroup | None = None
        self._batches: dist.ProcessGroup | None = None
        self.versions: PartChannel | None = None
        """For versions; None if there are no other ranks."""
        self.saves: PartChannel | None = None
        """For checkpoints."""
        self._timeout: datetime.timedelta | None = None
        self.sequence_group: SequenceGroup | None = None
        """The ranks that share each micro-batch with this one; None: it has its own."""
        self.splits_matrices = False
        """The ranks of a sequence group also split matrices."""
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}
        """By replicas and ranks that split matrices: policy, critic and fixed models share the process groups."""
        self._sending = threading.Lock()
        """The end of batches is sent from another thread than batches, and must not interleave with one."""

    @staticmethod
    def alone(device: str | torch.device = "cpu") -> Ranks:
        """Return a group of one process, without a process group."""
        return Ranks(0, 1, torch.device(device))

    @staticmethod
    def join(spec: RankSpec, device: str, *, timeout_s: float, order_timeout_s: float) -> Ranks:
        """Join the other ranks at `spec.ranks_address`. Raises RankLost if they do not join within `timeout_s`."""
        ranks = Ranks(spec.rank, spec.num_ranks, own_device(device, spec))
        if ranks.device.type == "cuda":
            torch.cuda.set_device(ranks.device)
        deadline, order_deadline = (datetime.timedelta(seconds=s) for s in (timeout_s, order_timeout_s))
        with peer_errors_as_rank_lost("connecting to the other ranks"):
            store = _store(spec, deadline)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo",
                store=store,
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=deadline,
            )
            ranks._timeout = deadline
            ranks._orders = dist.new_group(backend="gloo", timeout=order_deadline)
            background_deadline = order_deadline + datetime.timedelta(seconds=LONGEST_STEP_S)
            ranks._batches = dist.new_group(backend="gloo", timeout=background_deadline)
            versions = dist.new_group(backend="gloo", timeout=background_deadline)
            saves = dist.new_group(backend="gloo", timeout=deadline)
            if ranks.size > 1:
                ranks.versions = PartChannel(versions, ranks.size, "a version")
                ranks.saves = PartChannel(saves, ranks.size, "a checkpoint")
        return ranks

    @property
    def is_leader(self) -> bool:
        """True for rank 0, which talks to the controller and writes files."""
        return self.rank == 0

    @property
    def has_group(self) -> bool:
        """True if torch.distributed is initialised. A group of one may have it too, if its backend needs it."""
        return self._orders is not None

    # ------------------------------------------------------------ sequence groups

    def share_sequences(self, size: int, *, splits_matrices: bool = False) -> None:
        """Form sequence groups of `size` consecutive ranks, which must divide their number. All ranks call this.

        splits_matrices: each rank of a group has a part of the matrices, too (trainer/model/tensor_split.py).
        """
        assert self.size % size == 0, "validate refuses it"
        self.sequence_group, self.splits_matrices = None, splits_matrices
        if size > 1:
            with peer_errors_as_rank_lost("forming sequence groups"):
                group, _ = dist.new_subgroups(size, timeout=self._timeout)
            assert group is not None
            self.sequence_group = SequenceGroup(self.rank % size, size, group)

    @property
    def num_shares(self) -> int:
        """Parts that a batch is dealt in: one for each rank, or for each sequence group."""
        return self.size if self.sequence_group is None else self.size // self.sequence_group.size

    @property
    def share(self) -> int:
        """This rank's part of a batch, 0 to num_shares - 1."""
        return self.rank if self.sequence_group is None else self.rank // self.sequence_group.size

    @property
    def tensor_place(self) -> int:
        """This rank's place among those that split matrices; 0 if it is alone."""
        assert self.sequence_group is not None or not self.splits_matrices
        return self.sequence_group.place if self.sequence_group is not None and self.splits_matrices else 0

    @property
    def is_share_counted(self) -> bool:
        """True on one of the ranks that have the same part of a batch."""
        return self.sequence_group is None or self.sequence_group.place == 0

    # ------------------------------------------------------------ meshes

    def mesh(self, replicas: int = 1, tensor: int = 1) -> DeviceMesh:
        """Return the ranks as a mesh of up to three dimensions, the last one of consecutive ranks: REPLICATE with
        several replicas, SHARD always, TENSOR with several ranks that split matrices. All ranks call this."""
        assert self.size % (replicas * tensor) == 0, "validate refuses it"
        sizes = {REPLICATE: replicas, SHARD: self.size // (replicas * tensor), TENSOR: tensor}
        found = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        shape = tuple(found.values())
        key = (replicas, tensor)
        if key not in self._meshes:
            with peer_errors_as_rank_lost("forming groups of ranks"):
                self._meshes[key] = self._make_mesh(shape, tuple(found))
        return self._meshes[key]

    def _make_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        if len(shape) == 1:
            return init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        places = torch.arange(self.size).view(shape)
        groups = []
        for dim in range(places.ndim):  # init_device_mesh would make groups with torch's deadline instead of ours
            members = places.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
            group, _ = dist.new_subgroups_by_enumeration(members, timeout=self._timeout)
            assert group is not None
            groups.append(group)
        return DeviceMesh.from_group(groups, self.device.type, places, mesh_dim_names=names)

    # ------------------------------------------------------------ orders

    def tell(self, order: Order) -> None:
        """On rank 0: order all ranks to run `order` now. Does nothing if there are no others."""
        if self.size > 1 and self.is_leader:
            with peer_errors_as_rank_lost(f"sending the other ranks the order to {order.name.lower()}"):
                dist.broadcast(torch.tensor([int(order)]), 0, group=self._orders)

    def hear(self) -> Order:
        """On other ranks: receive the next order. Raises RankLost if rank 0 exits or misses the deadline."""
        assert not self.is_leader
        number = torch.zeros(1, dtype=torch.int64)
        with peer_errors_as_rank_lost("waiting for rank 0"):
            dist.broadcast(number, 0, group=self._orders)
        return Order(int(number))

    # ------------------------------------------------------------ batches

    def send_batch(self, samples: Sequence[BatchSample], step: int, lineage: str) -> None:
        """On rank 0: send the samples of `step` to all others, which receive them in `next_batch`."""
        if self.size == 1 or not self.is_leader:
            return
        frames = encode(Batch(step=step, lineage=lineage, samples=tuple(samples)))
        self._send([np.frombuffer(frame, np.uint8) for frame in frames])

    def end_batches(self) -> None:
        """On rank 0: signal that there are no more batches."""
        if self.size > 1 and self.is_leader:
            self._send([])

    def next_batch(self) -> Batch | None:
        """On other ranks: receive the next batch, or None after the last."""
        assert not self.is_leader
        with peer_errors_as_rank_lost("waiting for a batch from rank 0"):
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

    # ------------------------------------------------------------ numbers of all ranks

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the same on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place; the same on each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: torch.Tensor) -> torch.Tensor:
        """Minimum over ranks, in place; the same on each."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def _reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(values, how)
        return values

    def wait_for_all(self, doing: str) -> None:
        """Wait until every rank has called this; it uses no device. `doing`: for the error. Raises RankLost."""
        if self.size > 1:
            with peer_errors_as_rank_lost(doing):
                dist.all_reduce(torch.zeros(1), group=self._orders)

    def close(self) -> None:
        """Leave the group. All ranks call this."""
        if self.has_group:
            self._orders = self._batches = self.versions = self.saves = self.sequence_group = None
            self._meshes.clear()
            dist.destroy_process_group()


def leave_at_once(error: BaseException) -> NoReturn:
    """End this process like `areal_like.process`, but without waiting for threads inside collectives.

    They wait for peers that are gone, and an interpreter that exits while they wait is aborted.
    """
    status = report_end(error)
    sys.stdout.flush()
    os._exit(status)


def own_device(device: str, spec: RankSpec) -> torch.device:
    """Return the device of a rank: the CPU, the named GPU plus the rank's offset, or the rank's only visible GPU."""
    first = torch.device(device)
    offset = 0 if spec.has_own_gpus else spec.rank
    return first if first.type != "cuda" else torch.device("cuda", (first.index or 0) + offset)


def _store(spec: RankSpec, timeout: datetime.timedelta) -> dist.Store:
    """Create the store for the rendezvous: a file for ranks of one machine, unreadable for other users, or a port.

    With a port, rank 0 listens on the given address only; by default torch would listen on every interface.
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
        raise MeetingPlaceTaken(f"rank 0 cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(LISTEN_BACKLOG)
    return dist.TCPStore(
        host, int(port), spec.num_ranks, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
