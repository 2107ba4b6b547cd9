"""A server's place, and our own, in the process group that carries weights.

Owns: meeting the group on both, the payload's way into the server while it stands still, the version's folder for a
server that must be started again. Refuses: the pause (engine.py), who takes part (the trainer), the proof that the
server holds what was sent (layout.py).

Two members per worker: the server, which loads what arrives at once, and this process, which receives the same
messages, checks them, knows from them what the server's own checksums must be, and writes them to disk. So a server
that dies later is started with the version in use, as ever. On CPUs and with one rank a server: elsewhere its checksums
are made by a function that only runs there, and nccl takes no second member on a GPU.

A server generates nothing while it meets a group, and neither that nor a payload has a deadline there. It is ours that
counts; a server that has missed it is to be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from areal_like.errors import TransferBroken, WeightError
from areal_like.weights.process_group import Bucket, GroupCall, buckets
from areal_like.weights.weight_store import WeightManifest
from rollout.engine.group_member import GroupMember
from rollout.engine.loading import DTYPES, tensors_of
from rollout.engine.sglang.client import ServerRefused, SGLangClient
from rollout.engine.sglang.keeper import RunningServer
from rollout.engine.sglang.layout import as_checkpoint
from rollout.engine.sglang.staging import StagedVersion, Stager, Summing

RANKS = 2
"""Places of a worker: its own, then its server's."""
Result = TypeVar("Result")


class ServerInGroup:
    """One engine's two places. Methods are called under the engine's load lock."""

    def __init__(self, stager: Stager, staging: ThreadPoolExecutor, summing: Summing, folder: Path) -> None:
        """`staging`: the thread of `stager`. `summing`: the proof of a version. `folder`: for what came this way."""
        self._stager, self._staging, self._summing, self._folder = stager, staging, summing, folder
        self._member = GroupMember(torch.device("cpu"))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-group")
        self._joined = ("", 0)
        """Group that the server of an epoch is in."""

    async def meet(self, call: GroupCall, live: RunningServer) -> None:
        """Be in the group, with this server. Raises TransferBroken; ServerGone: it does not answer any more."""
        if self._joined == (call.group, live.epoch):
            return
        (old, epoch), self._joined = self._joined, ("", 0)
        if not call.is_new:
            self.leave()
            raise TransferBroken(f"the server is not in {call.group}")
        if epoch == live.epoch:
            with contextlib.suppress(ServerRefused):
                await live.client.leave_group(old)
        meeting = asyncio.ensure_future(self._on_thread(lambda: self._member.meet(call)))
        try:
            await live.client.join_group(call, call.rank + 1)
        except ServerRefused as error:
            raise TransferBroken(f"the server did not meet {call.group}: {error.text[:200]}") from error
        finally:
            await asyncio.wait([meeting])  # no longer than the call's deadline
            meeting.exception()
        meeting.result()
        self._joined = (call.group, live.epoch)

    async def receive(self, call: GroupCall, client: SGLangClient, flush_cache: bool) -> StagedVersion:
        """Into the paused server, and into a folder. Whatever is raised, the server may hold part of it: ServerRefused,
        ServerGone, TransferBroken, WeightError (what came is not what was sent).
        """
        manifest = msgspec.json.decode(call.manifest, type=WeightManifest)
        receiving = asyncio.ensure_future(self._on_thread(lambda: self._member.receive(call)))
        try:
            await self._into_server(manifest, call, client, flush_cache=flush_cache)
        finally:
            await asyncio.wait([receiving])  # no longer than the call's deadline
            receiving.exception()
        _, payload = receiving.result()

        def lay_out() -> StagedVersion:
            tensors = tensors_of(manifest, payload)
            staged = self._stager.lay_out(manifest, tensors, self._folder)
            return dataclasses.replace(staged, checksums=self._summing(tensors))

        return await asyncio.get_running_loop().run_in_executor(self._staging, lay_out)

    async def _into_server(
        self, manifest: WeightManifest, call: GroupCall, client: SGLangClient, *, flush_cache: bool
    ) -> None:
        parts = list(buckets(manifest, call.bucket_bytes))
        await client.begin_update()
        for number, bucket in enumerate(parts, start=1):
            is_last = number == len(parts)
            await client.receive_bucket(
                announced(bucket), call, version=manifest.version if is_last else None,
                flush_cache=flush_cache and is_last,
            )  # fmt: skip
        await client.end_update()

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def leave(self) -> None:
        """Be in no group: the others in it hear of that at once."""
        self._joined = ("", 0)
        self._thread.submit(self._member.leave)

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self._thread.shutdown(wait=False)


def announced(bucket: Bucket) -> dict[str, Tensor]:
    """The bucket's tensors, without content, under the names and in the order that the server must receive them: its
    bytes are theirs one after another. Raises WeightError.
    """
    unknown = {entry.dtype for entry in bucket.entries} - DTYPES.keys()
    if unknown:
        raise WeightError(f"unknown dtype {', '.join(sorted(unknown))}")
    return as_checkpoint(
        {entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for entry in bucket.entries}
    )
