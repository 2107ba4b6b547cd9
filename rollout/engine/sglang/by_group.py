"""The process group that transfers weights, for one worker: its server's rank and its own.

The pause is in engine.py, the verification of the server's weights in layout.py; the trainer decides who takes part.

Each worker has two members: the server, which loads the data as it arrives, and this process, which receives the same
messages, verifies them, computes the checksums that the server must report, and writes them to disk. So a server that
dies later is restarted with the current version, as usual. This is supported on CPUs and with one rank per server: on
GPUs the server's checksums are computed by a function that only runs there, and nccl allows no second member on a GPU.

A server generates nothing while it joins a group, and has no deadline for that or for a payload. Our deadline applies;
a server that misses it must be replaced.
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
from rollout.engine.server.checkpoint_names import as_checkpoint
from rollout.engine.server.http import ServerRefused
from rollout.engine.server.keeper import RunningServer
from rollout.engine.server.staging import StagedVersion, Stager, Summing
from rollout.engine.sglang.client import SGLangClient

RANKS = 2
"""Ranks of a worker: its own, then its server's."""
Result = TypeVar("Result")


class ServerInGroup:
    """The two members of one engine. Methods are called with the engine's load lock held."""

    def __init__(self, stager: Stager, staging: ThreadPoolExecutor, summing: Summing, folder: Path) -> None:
        """`staging`: the thread of `stager`. `summing`: computes the checksums of a version. `folder`: for received
        versions."""
        self._stager, self._staging, self._summing, self._folder = stager, staging, summing, folder
        self._member = GroupMember(torch.device("cpu"))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-group")
        self._joined = ("", 0)
        """Epoch of a server and the group that it is in."""

    async def meet(self, call: GroupCall, live: RunningServer[SGLangClient]) -> None:
        """Join the group, with this server. Raises TransferBroken, or ServerGone if the server does not respond."""
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
            raise TransferBroken(f"the server did not join {call.group}: {error.text[:200]}") from error
        finally:
            await asyncio.wait([meeting])  # bounded by the call's deadline
            meeting.exception()
        meeting.result()
        self._joined = (call.group, live.epoch)

    async def receive(self, call: GroupCall, client: SGLangClient, flush_cache: bool) -> StagedVersion:
        """Receive a version into the paused server and into a folder. After any exception the server may have loaded
        part of it. Raises ServerRefused, ServerGone, TransferBroken, or WeightError (it arrived damaged).
        """
        manifest = msgspec.json.decode(call.manifest, type=WeightManifest)
        receiving = asyncio.ensure_future(self._on_thread(lambda: self._member.receive(call)))
        try:
            await self._into_server(manifest, call, client, flush_cache=flush_cache)
        finally:
            await asyncio.wait([receiving])  # bounded by the call's deadline
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
        """Leave the group; its other members notice at once."""
        self._joined = ("", 0)
        self._thread.submit(self._member.leave)

    def close(self) -> None:
        """Leave permanently."""
        self.leave()
        self._thread.shutdown(wait=False)


def announced(bucket: Bucket) -> dict[str, Tensor]:
    """The bucket's tensors, without content, with the names and in the order in which the server must receive them: the
    bucket is the concatenation of their bytes. Raises WeightError.
    """
    unknown = {entry.dtype for entry in bucket.entries} - DTYPES.keys()
    if unknown:
        raise WeightError(f"the weights contain tensors of unknown dtype: {', '.join(sorted(unknown))}")
    return as_checkpoint(
        {entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for entry in bucket.entries}
    )
