"""Rank 0 of the process group that transfers weights, on the trainer's side.

It contains the rendezvous, the group, and sending a payload. group_rounds.py decides which workers take part. The
trainer's own ranks are another group (ranks.py). All methods block: call them from one thread. Each wait in them has a
deadline.

The group is a separate object, not torch's default group and not registered there: other code of the process does not
see it, and it can be discarded in any state. The transport is plain TCP (or nccl's own), as between the trainer's
ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from areal_like.errors import TransferBroken
from areal_like.weights.process_group import GroupBackend, buckets, store_prefixes
from areal_like.weights.weight_store import WeightManifest

ProcessGroup = Any
"""torch's class; its stubs lack the constructors' options and `abort`."""
GLOO: Any = dist.ProcessGroupGloo
ROOT = 0
"""The trainer's rank in the group."""
LISTEN_BACKLOG = 1024
POLL_S = 0.0005

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # payloads are mapped read-only


class GroupRoot:
    """The root of a group of `size`. Its store listens at once; the members join during the first `bring`."""

    def __init__(
        self, name: str, size: int, *, host: str, backend: GroupBackend, device: str, deadline_s: float
    ) -> None:
        """Raises TransferBroken if it cannot listen on `host`."""
        self.name, self.size, self.host, self.backend = name, size, host, backend
        self._device = torch.device(device if backend == "nccl" else "cpu")
        self._deadline_s = deadline_s
        self._group: ProcessGroup | None = None
        self._store: dist.Store | None
        self._store, self.port = _listening_store(host, size, deadline_s)

    def bring(self, manifest: WeightManifest, payload: memoryview, bucket_bytes: int) -> None:
        """Send a payload to all members. Raises TransferBroken; the group must not be used afterwards."""
        broken = ""
        try:
            self._send(manifest, payload, bucket_bytes)
        except (RuntimeError, OSError, TransferBroken) as error:
            broken = " ".join(str(error).split())[:300]
        if broken:  # outside of `except`: a traceback keeps connections open, and peers wait
            raise TransferBroken(broken)

    def _send(self, manifest: WeightManifest, payload: memoryview, bucket_bytes: int) -> None:
        if self._group is None:
            self._group = self._meet()
        until_s = time.monotonic() + self._deadline_s
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        before: tuple[dist.Work, torch.Tensor] | None = None
        for bucket in buckets(manifest, bucket_bytes):
            part = whole[bucket.offset : bucket.offset + bucket.num_bytes].to(self._device)
            work = self._group.broadcast(part, ROOT)
            if before is not None:
                self._finish(before[0], until_s)
            before = (work, part)
        if before is not None:
            self._finish(before[0], until_s)

    def leave(self) -> None:
        """Close every connection; safe in any state, but not while `bring` runs."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it may have failed already
                group.abort()
        self._store = None

    def _meet(self) -> ProcessGroup:
        """Wait until all members have joined, at most until the deadline."""
        store = self._store
        assert store is not None, "left already"
        for prefix in (*store_prefixes(self.name), "cpu/" if self.backend == "gloo" else "cuda/"):
            store = dist.PrefixStore(prefix, store)
        patience = datetime.timedelta(seconds=self._deadline_s)
        if self.backend == "nccl":
            torch.cuda.set_device(self._device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = 10 * patience  # our deadline comes first: the library's ends the process
            return dist.ProcessGroupNCCL(store, 0, self.size, nccl)
        gloo = GLOO._Options()
        gloo._devices = [GLOO.create_device(hostname=self.host)]
        gloo._timeout = patience
        return GLOO(store, 0, self.size, gloo)

    def _finish(self, work: dist.Work, until_s: float) -> None:
        if self.backend == "gloo":
            work.wait(datetime.timedelta(seconds=max(until_s - time.monotonic(), 0.001)))
            return
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise TransferBroken(f"not finished within {self._deadline_s:g} s")
            time.sleep(POLL_S)


def _listening_store(host: str, size: int, deadline_s: float) -> tuple[dist.Store, int]:
    """Create a store on a free port of this address only; by default torch would listen on every interface."""
    bare = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((bare, 0))
        listener.listen(LISTEN_BACKLOG)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            bare, port, size, is_master=True, timeout=datetime.timedelta(seconds=deadline_s), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (OSError, RuntimeError) as error:
        listener.close()
        raise TransferBroken(f"cannot listen on {bare}: {error}") from error
    return store, port
