"""The worker's end of the process group that transfers weights.

The pause and the use of the tensors are in the engine, joining in receiver.py. All methods block: call them from a
thread. Each wait has a deadline. All methods block: call them from a thread. Each wait in them has a deadline.

A payload is received into a buffer that is reused for the next one. Checksums of a bucket are computed while the next
bucket arrives. After any failure of the transfer the member leaves the group; the other members notice that their
connections close.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import zlib
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from areal_like.errors import TransferBroken, WeightsDamaged
from areal_like.transport.sockets import own_host
from areal_like.weights.process_group import Bucket, GroupCall, buckets, store_prefixes
from areal_like.weights.weight_store import WeightManifest

ProcessGroup = Any
"""Torch's class; its stubs lack the constructors' options and `abort`."""
GLOO: Any = dist.ProcessGroupGloo
ROOT = 0
"""The trainer's rank in the group."""
POLL_S = 0.0005


class GroupMember:
    """One engine's membership in a group, or in the group that replaces it."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the engine's; nccl receives directly into it, gloo through host memory."""
        self._device = device
        self._name = ""
        self._group: ProcessGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def meet(self, call: GroupCall) -> None:
        """Join the group of the call; generation may continue meanwhile. Raises TransferBroken."""
        if self._group is not None and self._name == call.group:
            return
        self.leave()
        if not call.is_new:
            raise TransferBroken(f"this worker is no longer in process group {call.group}")
        try:
            self._group, self._name = _enter(call, self._device), call.group
        except (RuntimeError, OSError) as error:
            raise TransferBroken(f"cannot join {call.group}: {_words(error)}") from error

    def receive(self, call: GroupCall) -> tuple[WeightManifest, dict[str, memoryview]]:
        """Receive the version: its manifest and each tensor's verified bytes in host memory, which the next call
        overwrites.

        Raises TransferBroken if it did not arrive, WeightError if it arrived damaged.
        """
        manifest = msgspec.json.decode(call.manifest, type=WeightManifest)
        if self._buffer.numel() < manifest.num_bytes:
            self._buffer = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
        bytes_ = memoryview(self._buffer.numpy().data)
        until_s = time.monotonic() + call.deadline_s
        corrupt = broken = ""
        try:
            corrupt = self._take(manifest, call, bytes_, until_s)
        except (RuntimeError, OSError, TransferBroken) as error:
            broken = _words(error)
        if broken:  # outside the handler: a traceback would keep connections open, on which the other members wait
            self.leave()
            raise TransferBroken(f"the transfer of version {call.version} by {call.group} was interrupted: {broken}")
        if corrupt:
            raise WeightsDamaged(
                f"tensor {corrupt} of version {call.version} ({call.group}) is corrupt: the checksum differs"
            )
        return manifest, {entry.name: bytes_[entry.offset :][: entry.num_bytes] for entry in manifest.tensors}

    def leave(self) -> None:
        """Close the connections; safe in any state."""
        group, self._group, self._name = self._group, None, ""
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it is closed already
                group.abort()

    def _take(self, manifest: WeightManifest, call: GroupCall, payload: memoryview, until_s: float) -> str:
        """Receive all buckets. Returns the name of the first damaged tensor, or an empty text."""
        corrupt = ""
        before: Bucket | None = None
        for bucket in buckets(manifest, call.bucket_bytes):
            arriving = self._arriving(bucket, call)
            if before is not None:
                corrupt = corrupt or _corrupt(before, payload)
            self._finish(*arriving, bucket, until_s)
            before = bucket
        return corrupt or (_corrupt(before, payload) if before is not None else "")

    def _arriving(self, bucket: Bucket, call: GroupCall) -> tuple[dist.Work, torch.Tensor]:
        assert self._group is not None, "joined before"
        part = self._buffer[bucket.offset : bucket.offset + bucket.num_bytes]
        if call.backend == "nccl":
            part = torch.empty_like(part, device=self._device)
        return self._group.broadcast(part, ROOT), part

    def _finish(self, work: dist.Work, part: torch.Tensor, bucket: Bucket, until_s: float) -> None:
        if part.device.type == "cpu":
            work.wait(datetime.timedelta(seconds=max(until_s - time.monotonic(), 0.001)))
            return
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise TransferBroken("the deadline of the transfer has passed")
            time.sleep(POLL_S)
        self._buffer[bucket.offset : bucket.offset + bucket.num_bytes].copy_(part)


def _enter(call: GroupCall, device: torch.device) -> ProcessGroup:
    patience = datetime.timedelta(seconds=call.deadline_s)
    store: dist.Store = dist.TCPStore(call.host.strip("[]"), call.port, call.size, is_master=False, timeout=patience)
    for prefix in (*store_prefixes(call.group), "cpu/" if call.backend == "gloo" else "cuda/"):
        store = dist.PrefixStore(prefix, store)
    if call.backend == "nccl":
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 10 * patience  # our own deadline comes first, because the library's ends the process
        return dist.ProcessGroupNCCL(store, call.rank, call.size, nccl)
    host = own_host(f"tcp://{call.host}:{call.port}").strip("[]")
    gloo = GLOO._Options()
    gloo._devices = [GLOO.create_device(hostname=host)]
    gloo._timeout = patience
    return GLOO(store, call.rank, call.size, gloo)


def _corrupt(bucket: Bucket, payload: memoryview) -> str:
    """Name of the first tensor of a bucket whose checksum differs; empty if there is none."""
    for entry in bucket.entries:
        if zlib.crc32(payload[entry.offset : entry.offset + entry.num_bytes]) != entry.crc32:
            return entry.name
    return ""


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
