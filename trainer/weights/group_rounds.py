"""Sends each version to the workers by a process group: which workers take part, and when the group is renewed.

The transport is in group_root.py. Versions that are not the newest and workers that join too late use the stream. No
wait is unlimited.

There is one round per version. It begins as soon as all workers of the last round that still send heartbeats have
joined, or `gather_s` after the first did, with those that have. A worker that comes later gets a NoGroup, and is waited
for the next time. If the members are the same as last time, the group is reused; otherwise, and after a failure, a new
group (a new generation) is created.

Map of the loops
  run        waits for the first join (woken by `join`), then for the others (at most gather_s), then for the wire
  wire       one thread: meets the members and sends the payload; every wait in it ends at the round's deadline
Callers of `offer`, `join` and `left` never wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_like.device_names import names_gpu
from areal_like.errors import TransferBroken
from areal_like.weights.process_group import GroupBackend, GroupCall, JoinRequest, NoGroup
from areal_like.weights.weight_store import WeightManifest, map_payload
from areal_like.wire.messages import Message
from trainer.config import GroupSettings
from trainer.weights.group_root import GroupRoot

log = logging.getLogger(__name__)

FIRST_S = 0.5
"""How long a round gathers workers if none is expected."""
Result = TypeVar("Result")
Send = Callable[[str, Message], bool]


@dataclass
class _Round:
    """One version on offer. `payload` is a mapped file: it uses no additional memory."""

    version: int
    lineage: str
    manifest: WeightManifest
    payload: memoryview
    joined: dict[str, JoinRequest] = field(default_factory=dict)
    calls: dict[str, GroupCall] = field(default_factory=dict)
    """Messages sent to its members, once it has begun."""


class GroupRounds:
    """Runs the rounds, on one event loop: `run` indefinitely alongside `offer`; `close` at the end."""

    def __init__(self, settings: GroupSettings, *, run_id: str, host: str, device: str, send: Send) -> None:
        """`host`: address for members. `device`: the trainer's; `send` puts a message into a worker's queue."""
        self._settings, self._run_id, self._host, self._device, self._send = settings, run_id, host, device, send
        self._round: _Round | None = None
        self._begun: _Round | None = None
        self._expected: set[str] = set()
        """Workers that are expected: they took part in the last round or joined it too late, and still send
        heartbeats."""
        self._members: dict[str, int] = {}
        """Members of the current group, and the number of ranks of each; empty if there is none."""
        self._root: GroupRoot | None = None
        self._generation = 0
        self._changed = asyncio.Event()
        self._wire = ThreadPoolExecutor(1, "weights-group")
        self.counters = dict.fromkeys(
            ("weights_group_rounds", "weights_group_broken", "weights_group_generations", "weights_group_bytes"), 0.0
        )

    # ------------------------------------------------------------ events

    def offer(self, manifest_path: Path) -> None:
        """Set the version to be sent, a full one that was written. Raises WeightError if it was deleted already."""
        manifest = msgspec.json.decode(manifest_path.read_bytes(), type=WeightManifest)
        payload = map_payload(manifest_path.with_name(manifest.payload), manifest.num_bytes)
        if self._round is not None:
            for peer in self._round.joined:
                self._refuse(peer, self._round.version, self._round.lineage, "a newer version was published")
        self._round = _Round(manifest.version, manifest.lineage, manifest, payload)

    def join(self, peer: str, request: JoinRequest) -> None:
        """A worker is ready for a version. A repeated request gets the same answer."""
        wanted = (request.version, request.lineage)
        if self._begun is not None and (self._begun.version, self._begun.lineage) == wanted:
            call = self._begun.calls.get(peer)
            if call is None:
                self._expected.add(peer)  # expected in the next round
                self._refuse(peer, *wanted, "the transfer of this version has already started")
            else:
                self._send(peer, call)
        elif self._round is None or (self._round.version, self._round.lineage) != wanted:
            self._refuse(peer, *wanted, "this version is not the newest, or its transfer has ended")
        else:
            self._round.joined[peer] = request
            self._changed.set()

    def left(self, peer: str) -> None:
        """A worker exited, is silent, or was restarted: a group that includes it cannot be used any more."""
        self._expected.discard(peer)
        if self._round is not None:
            self._round.joined.pop(peer, None)
        if peer in self._members:
            self._members = {}
        self._changed.set()

    def _refuse(self, peer: str, version: int, lineage: str, reason: str) -> None:
        self._send(peer, NoGroup(version=version, lineage=lineage, reason=reason))

    # ------------------------------------------------------------ rounds

    async def run(self) -> None:
        """Run rounds until cancelled by the sender."""
        while True:
            self._changed.clear()
            round_ = self._round
            if round_ is None or not round_.joined:
                await self._changed.wait()
            elif await self._is_complete(round_):
                await self._hold(round_)

    async def _is_complete(self, round_: _Round) -> bool:
        """Wait for the expected workers; False if another version replaced this one meanwhile, or all have left."""
        due_s = time.monotonic() + (
            self._settings.gather_s if self._expected else min(FIRST_S, self._settings.gather_s)
        )
        while self._round is round_ and round_.joined:
            left_s = due_s - time.monotonic()
            if left_s <= 0 or (self._expected and self._expected <= round_.joined.keys()):
                return True
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return False

    async def _hold(self, round_: _Round) -> None:
        """Call the members and send. After a failure, members that were called notice it by their own deadline."""
        self._round, self._begun = None, round_
        members = {peer: round_.joined[peer].num_ranks for peer in sorted(round_.joined)}
        backend = self._backend(round_)
        started_s = time.monotonic()
        self._expected = set(members)
        try:
            is_new = members != self._members or self._root is None or self._root.backend != backend
            if is_new:
                await self._make(members, backend, round_.lineage)
            root = self._root
            assert root is not None
            rank = 1
            for peer, places in members.items():
                round_.calls[peer] = self._call(round_, root, rank, is_new=is_new)
                self._send(peer, round_.calls[peer])
                rank += places
            await self._on_wire(root.bring, round_.manifest, round_.payload, self._settings.bucket_bytes)
        except TransferBroken as error:
            self.counters["weights_group_broken"] += 1
            log.warning(
                "sending version %d to the process group of %s failed: %s", round_.version, ", ".join(members), error
            )
            await self._drop()
            return
        self._members = members
        self.counters["weights_group_rounds"] += 1
        self.counters["weights_group_bytes"] += float(round_.manifest.num_bytes)
        took_s = time.monotonic() - started_s
        log.info(
            "sent version %d to %s through the process group %s in %.3f s",
            round_.version, ", ".join(members), root.name, took_s,
        )  # fmt: skip

    def _call(self, round_: _Round, root: GroupRoot, rank: int, *, is_new: bool) -> GroupCall:
        return GroupCall(
            version=round_.version, lineage=round_.lineage, group=root.name, is_new=is_new,
            host=root.host, port=root.port, rank=rank, size=root.size, backend=root.backend,
            bucket_bytes=self._settings.bucket_bytes, deadline_s=self._settings.transfer_s,
            manifest=msgspec.json.encode(round_.manifest),
        )  # fmt: skip

    def _backend(self, round_: _Round) -> GroupBackend:
        """Return the configured backend; for `auto`, nccl if all devices are GPUs."""
        if self._settings.backend != "auto":
            return self._settings.backend
        on_gpus = all(request.device == "cuda" for request in round_.joined.values())
        return "nccl" if on_gpus and names_gpu(self._device) else "gloo"

    # ------------------------------------------------------------ the group

    async def _make(self, members: dict[str, int], backend: GroupBackend, lineage: str) -> None:
        """Create the next generation of the group: its store listens; the members join when the payload is sent.

        The lineage is part of its name: workers outlive a trainer, and must not confuse a group of the next trainer
        with that of the previous one, of which they are members.
        """
        await self._drop()
        self._generation += 1
        self.counters["weights_group_generations"] += 1
        self._root = await self._on_wire(
            lambda: GroupRoot(
                f"{self._run_id}.{lineage}.weights.{self._generation}", 1 + sum(members.values()),
                host=self._host, backend=backend, device=self._device, deadline_s=self._settings.transfer_s,
            )
        )  # fmt: skip

    async def _drop(self) -> None:
        """Leave the group: its members notice it when their sockets close."""
        root, self._root, self._members = self._root, None, {}
        if root is not None:
            await self._on_wire(root.leave)

    async def _on_wire(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._wire, work, *args)

    async def close(self) -> None:
        """Leave the group. A running transfer ends at its deadline, in the background."""
        root, self._root = self._root, None
        if root is not None:
            self._wire.submit(root.leave)
        self._wire.shutdown(wait=False)
