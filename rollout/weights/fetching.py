"""Fetches payloads from the trainer, or from other workers that have them, and handles their failures.

The trainer decides which worker fetches from which; the use of a payload is in receiver.py, files in chunks.py.

Used by one caller at a time. Replies of the trainer and chunks of the parent are awaited in intervals of POLL_S. A
parent that is silent for SILENT_S, sends no chunk for STALLED_S, does not have the payload, or sends MAX_BAD damaged
chunks is dropped, and the trainer names another. The caller's deadline bounds the whole. Received chunks are kept: only
missing ones are requested again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from areal_like.errors import ChannelError, DeadlineExceeded, OperationError, WeightError, WeightsDamaged
from areal_like.weights.delta import Base
from areal_like.weights.process_group import GroupCall, JoinRequest, NoGroup
from areal_like.weights.stream import (
    FROM_RELAY,
    FROM_TRAINER,
    WINDOW_CHUNKS,
    Chunk,
    ChunkRequest,
    Locator,
    NoChunk,
    ParentRequest,
    Payload,
    TransferPlan,
    TransferUnavailable,
    UpstreamPeer,
    WayRequest,
)
from areal_like.wire.messages import Message, Welcome
from rollout.hub_peer import HubPeer
from rollout.weights.chunks import ChunkFile
from rollout.weights.port import MakeWire

log = logging.getLogger(__name__)

POLL_S = 0.25
CONNECT_S = 5.0
ASK_AGAIN_S = 3.0
SILENT_S = 4.0
"""Time without a heartbeat after which the parent's process counts as dead or stopped."""
STALLED_S = 15.0
"""Time with heartbeats but without a chunk. It is longer than SILENT_S, so that a parent can replace its own parent
first."""
MAX_BAD = 8
MAX_MOVES = 64
"""Largest number of parents tried for one payload; far more than the depth of the tree."""

Reply = TypeVar("Reply", bound=Message)


class ParentLost(OperationError):
    """This parent does not provide the payload."""


class Fetcher:
    """`on_chunk(file, index)`: called when a chunk arrives (others may wait for it). `serve_address`: where other
    workers fetch from this one."""

    def __init__(self, make_wire: MakeWire, serve_address: str, on_chunk: Callable[[ChunkFile, int], None]) -> None:
        self._make_wire, self._serve_address, self._on_chunk = make_wire, serve_address, on_chunk
        self._trainer: HubPeer | None = None
        self._trainer_address = ""
        self.counters = {"fetched_chunks": 0.0, "fetched_bytes": 0.0, "damaged_chunks": 0.0, "lost_parents": 0.0}

    async def way(self, locator: Locator, base: Base | None) -> tuple[Payload, ...]:
        """Payloads that lead to a version. Raises WeightError if there are none."""
        version, held = base if base is not None else (-1, "")
        asked = WayRequest(version=locator.version, lineage=locator.lineage, base_version=version, base_digest=held)
        wanted = (locator.version, locator.lineage)

        def pick(message: Message) -> TransferPlan | TransferUnavailable | None:
            return (
                message
                if isinstance(message, TransferPlan | TransferUnavailable) and _names(message) == wanted
                else None
            )

        reply: TransferPlan | TransferUnavailable = await self._ask(locator.address, asked, pick)
        if isinstance(reply, TransferUnavailable):
            raise WeightsDamaged(f"version {locator.version} is not available: {reply.reason}")
        return reply.payloads

    async def join(self, address: str, request: JoinRequest) -> GroupCall | NoGroup:
        """The trainer's answer, once it has gathered the group; the caller sets the deadline."""
        wanted = (request.version, request.lineage)

        def pick(message: Message) -> GroupCall | NoGroup | None:
            if isinstance(message, GroupCall | NoGroup) and (message.version, message.lineage) == wanted:
                return message
            return None

        return await self._ask(address, request, pick)

    async def fetch(self, locator: Locator, file: ChunkFile) -> None:
        """Fetch all chunks of `file`. Raises WeightError if the payload is no longer available; the caller sets the
        deadline."""
        lost = ""
        for _ in range(MAX_MOVES):
            request = ParentRequest(payload=file.payload.name, address=self._serve_address, lost=lost)
            parent = await self._ask(
                locator.address,
                request,
                lambda message: (
                    message if isinstance(message, UpstreamPeer) and message.payload == file.payload.name else None
                ),
            )
            if not parent.address:
                raise WeightsDamaged(f"{file.payload.name} is no longer available")
            try:
                await self._from_parent(locator, parent.address, file)
                return
            except (ParentLost, ChannelError, DeadlineExceeded) as error:
                lost = parent.address
                self.counters["lost_parents"] += 1
                left = len(file.missing())
                log.warning("%s: %s; %d chunks of %s are still missing", lost, error, left, file.payload.name)
        raise WeightError(f"{file.payload.name} could not be fetched: {MAX_MOVES} sources failed in a row")

    async def close(self) -> None:
        """Close the connection to the trainer."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            await trainer.close("done")

    # ------------------------------------------------------------ one parent

    async def _from_parent(self, locator: Locator, address: str, file: ChunkFile) -> None:
        if address == locator.address:
            await self._pull(await self._connected(address), file)
            return
        wire = self._make_wire(address, FROM_RELAY)
        try:
            await wire.connect(CONNECT_S)
            await self._pull(wire, file)
        finally:
            await wire.close("done")

    async def _pull(self, wire: HubPeer, file: ChunkFile) -> None:
        wanted, asked, num_bad = deque(file.missing()), set[int](), 0
        progress_s = time.monotonic()
        while not file.is_complete:
            while wanted and len(asked) < WINDOW_CHUNKS:
                index = wanted.popleft()
                await wire.send(ChunkRequest(payload=file.payload.name, index=index), timeout_s=SILENT_S)
                asked.add(index)
            message = await wire.receive(POLL_S)
            if isinstance(message, Chunk) and message.payload == file.payload.name and message.index in asked:
                asked.discard(message.index)
                if self._put(file, message):
                    progress_s = time.monotonic()
                    continue
                num_bad += 1
                wanted.append(message.index)
                if num_bad >= MAX_BAD:
                    raise ParentLost(f"sent {num_bad} damaged chunks")
            elif isinstance(message, NoChunk) and message.payload == file.payload.name:
                raise ParentLost(message.reason)
            elif isinstance(message, Welcome):  # it has no record of this worker, nor of its requests
                wanted.extendleft(sorted(asked, reverse=True))
                asked.clear()
            elif message is None:
                _check_silence(wire, time.monotonic() - progress_s)

    def _put(self, file: ChunkFile, message: Chunk) -> bool:
        if not file.put(message.index, message.data):
            self.counters["damaged_chunks"] += 1
            return False
        self.counters["fetched_chunks"] += 1
        self.counters["fetched_bytes"] += message.data.nbytes
        self._on_chunk(file, message.index)
        return True

    # ------------------------------------------------------------ the trainer

    async def _connected(self, address: str) -> HubPeer:
        if self._trainer is not None and self._trainer_address == address:
            return self._trainer
        await self.close()
        wire = self._make_wire(address, FROM_TRAINER)
        await wire.connect(CONNECT_S)
        self._trainer, self._trainer_address = wire, address
        return wire

    async def _ask(self, address: str, request: Message, pick: Callable[[Message], Reply | None]) -> Reply:
        """The trainer's reply; the request is repeated until the caller's deadline."""
        while True:
            try:
                wire = await self._connected(address)
                await wire.send(request, timeout_s=ASK_AGAIN_S)
                if (reply := await _reply(wire, pick)) is not None:
                    return reply
            except (ChannelError, DeadlineExceeded) as error:
                log.warning("the trainer at %s does not respond: %s", address, error)
                await self.close()
                await asyncio.sleep(POLL_S)


async def _reply(wire: HubPeer, pick: Callable[[Message], Reply | None]) -> Reply | None:
    """The first message that `pick` accepts; None after ASK_AGAIN_S. Late chunks are skipped."""
    until_s = time.monotonic() + ASK_AGAIN_S
    while (left_s := until_s - time.monotonic()) > 0:
        message = await wire.receive(min(left_s, POLL_S))
        if message is not None and (picked := pick(message)) is not None:
            return picked
    return None


def _check_silence(wire: HubPeer, stalled_s: float) -> None:
    if wire.hub_silence_s > SILENT_S:
        raise ParentLost(f"silent for {wire.hub_silence_s:.1f} s")
    if stalled_s > STALLED_S:
        raise ParentLost(f"no chunk received for {stalled_s:.1f} s")


def _names(message: TransferPlan | TransferUnavailable) -> tuple[int, str]:
    return message.version, message.lineage
