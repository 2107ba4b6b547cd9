"""A worker's end of the process group that carries weights.

Owns: meeting the others, receiving a payload, checking it. Refuses: the pause and what becomes of the tensors (the
engine), joining (receiver.py). All methods block: call them from a thread. Each wait in them has a deadline.

A payload is received into one buffer that stays for the next one. Checksums of a bucket are computed while the next
one arrives. Whatever fails on the wire, the group is left: its other members notice that their connections close.
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
"""Torch's own class; its stubs know neither the constructors' options nor `abort`."""
GLOO: Any = dist.ProcessGroupGloo
ROOT = 0
"""The trainer's rank in the group."""
POLL_S = 0.0005


class GroupMember:
    """One engine's place in a group, or in its successor."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the engine's; only nccl sends straight into it, gloo goes through host memory."""
        self._device = device
        self._name = ""
        self._group: ProcessGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def meet(self, call: GroupCall) -> None:
        """Be in the group that is called; generation may go on meanwhile. Raises TransferBroken."""
        if self._group is not None and self._name == call.group:
            return
        self.leave()
        if not call.is_new:
            raise TransferBroken(f"this worker is not in {call.group} any more")
        try:
            self._group, self._name = _enter(call, self._device), call.group
        except (RuntimeError, OSError) as error:
            raise TransferBroken(f"{call.group} was not met: {_words(error)}") from error

    def receive(self, call: GroupCall) -> tuple[WeightManifest, dict[str, memoryview]]:
        """The version's manifest and each tensor's bytes in host memory, checked; they are overwritten by the next.

        Raises TransferBroken when it did not come, WeightError when what came is not what was sent.
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
        if broken:  # outside: what a traceback holds keeps connections open, and those at their ends wait
            self.leave()
            raise TransferBroken(f"version {call.version} by {call.group} broke off: {broken}")
        if corrupt:
            raise WeightsDamaged(
                f"tensor {corrupt} of version {call.version} ({call.group}) is corrupt: checksum differs"
            )
        return manifest, {entry.name: bytes_[entry.offset :][: entry.num_bytes] for entry in manifest.tensors}

    def leave(self) -> None:
        """Close the connections; safe in any state."""
        group, self._group, self._name = self._group, None, ""
        if group is not None:
            with contextlib.suppress(RuntimeError):  # gone is gone
                group.abort()

    def _take(self, manifest: WeightManifest, call: GroupCall, payload: memoryview, until_s: float) -> str:
        """All buckets; the name of the first tensor that is damaged, or nothing."""
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
        assert self._group is not None, "met before"
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
                raise TransferBroken("its deadline passed")
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
        nccl._timeout = 10 * patience  # ours comes first: the library's own ends the process
        return dist.ProcessGroupNCCL(store, call.rank, call.size, nccl)
    host = own_host(f"tcp://{call.host}:{call.port}").strip("[]")
    gloo = GLOO._Options()
    gloo._devices = [GLOO.create_device(hostname=host)]
    gloo._timeout = patience
    return GLOO(store, call.rank, call.size, gloo)


def _corrupt(bucket: Bucket, payload: memoryview) -> str:
    """Name of the first tensor of a bucket whose checksum differs; empty where none does."""
    for entry in bucket.entries:
        if zlib.crc32(payload[entry.offset : entry.offset + entry.num_bytes]) != entry.crc32:
            return entry.name
    return ""


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
