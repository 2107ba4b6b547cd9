"""Serves published versions to the rollout workers through sockets, in chunks, on request.

It is the sender (port.py) of `stream` and `distributed`. For versions that are sent by a process group
(group_rounds.py), it receives the workers' join requests, and serves workers that missed the group.

It has the trainer's hub for weights, the payloads being sent, and one fan-out tree per payload. It sends only on
request. worker.py decides when a version is published, and version_writer.py what it contains.

Map of the loops, on the trainer's event loop:
  run         waits for the hub; woken by any rollout worker. Requests for chunks and parents are answered at once.
  (a task)    per WayRequest: opens the files and computes the chunks' checksums in a thread, once per payload, then
              answers. A worker has at most one of these in progress; its next one waits for it.
Memory: a payload is a mapped file; at most WINDOW_CHUNKS of its chunks per fetching worker are in the sockets' queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from areal_like.config import ProcessSpec
from areal_like.errors import WeightError
from areal_like.transport.channel import Hub
from areal_like.transport.sockets import own_host
from areal_like.weights.catalog import AnyManifest, Catalog
from areal_like.weights.delta import Base, DeltaManifest
from areal_like.weights.process_group import JoinRequest, NoGroup
from areal_like.weights.stream import (
    TO_TRAINER,
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
from areal_like.weights.weight_store import map_payload
from areal_like.wire.messages import Hello, Message
from trainer.config import TrainerSettings, WeightStoreSettings
from trainer.weights.fan_out import FanOutTree
from trainer.weights.group_rounds import GroupRounds, Send

log = logging.getLogger(__name__)

RECEIVE_S = 0.5
MAX_PAYLOADS = 512
"""Payloads open at once; the least recently requested one is closed. More than the length of a chain of deltas."""
IDLE_S = 10.0
"""A payload whose file the store has deleted is closed, and its memory released, if not requested for this long."""
SILENT_S = 10.0
"""A worker that sends nothing for this long is removed from the trees."""


@dataclass
class _Open:
    """A payload being sent: its description, its bytes (a mapped file) and its fan-out tree."""

    payload: Payload
    path: Path
    data: memoryview
    tree: FanOutTree
    asked_s: float = 0.0


class WeightSender:
    """Answers requests of rollout workers. Call `start`, then `run` indefinitely; `close` when the run is over."""

    def __init__(
        self,
        root: Path,
        *,
        run_id: str,
        bind: str,
        curve_dir: Path,
        chunk_bytes: int,
        fan_out: int,
        make_rounds: Callable[[Send], GroupRounds] | None = None,
    ) -> None:
        """`make_rounds`: creates the rounds of a process group; None: versions are only streamed."""
        self._catalog, self._chunk_bytes, self._fan_out = Catalog(root), chunk_bytes, fan_out
        self._hub = Hub(run_id=run_id, role="trainer", bind=bind, curve_dir=curve_dir, accept=TO_TRAINER)
        self._rounds = make_rounds(self._hub.send) if make_rounds is not None else None
        self._payloads: OrderedDict[str, _Open] = OrderedDict()
        self._asking: set[str] = set()
        self._opening = asyncio.Lock()
        self._num_rewrites = 0
        self.address = ""
        self._counts = dict.fromkeys(
            ("weights_sent_chunks", "weights_sent_bytes", "weights_moved_children", "weights_refused_chunks"), 0.0
        )

    async def start(self) -> None:
        """Bind the socket. Raises UserError."""
        self.address = await self._hub.start()

    @property
    def counters(self) -> dict[str, float]:
        """Monotonic counters: chunks and bytes sent; rounds, generations and bytes of the process group."""
        return self._counts | (self._rounds.counters if self._rounds is not None else {})

    async def publish(self, manifest_path: Path, version: int, lineage: str) -> str:
        """Return the location of a version that was just written, for its announcement. Raises WeightError."""
        if self._rounds is not None:
            self._rounds.offer(manifest_path)
        return str(Locator(self.address, version, lineage, by_group=self._rounds is not None))

    def rewritten(self, version: int, lineage: str) -> None:
        """Discard payloads of a version whose files were written again."""
        self._num_rewrites += 1
        stem = f"v{version:08d}-{lineage}."
        for name in [name for name in self._payloads if name.startswith(stem)]:
            del self._payloads[name]

    async def run(self) -> None:
        """Serve until cancelled by the trainer."""
        async with asyncio.TaskGroup() as group:
            if self._rounds is not None:
                group.create_task(self._rounds.run(), name="weights:rounds")
            while True:
                received = await self._hub.receive(RECEIVE_S)
                for name in self._hub.silent(SILENT_S):
                    self._forget(name)
                if received is not None:
                    self._take(*received, group)

    async def close(self) -> None:
        """Close the hub; queued messages get a moment to be sent."""
        if self._rounds is not None:
            await self._rounds.close()
        await self._hub.close()

    # ------------------------------------------------------------ requests of workers

    def _take(self, peer: str, message: Message, group: asyncio.TaskGroup) -> None:
        match message:
            case ChunkRequest():
                self._send_chunk(peer, message)
            case WayRequest():
                if peer not in self._asking:  # a repeated request: the answer is being prepared
                    self._asking.add(peer)
                    group.create_task(self._answer(peer, message), name=f"way:{peer}")
            case ParentRequest():
                self._hub.send(peer, UpstreamPeer(payload=message.payload, address=self._parent(peer, message)))
            case JoinRequest():
                self._join(peer, message)
            case Hello():  # a new process of this name is in no group
                if self._rounds is not None:
                    self._rounds.left(peer)
            case _:  # a Goodbye
                self._forget(peer)

    def _join(self, peer: str, request: JoinRequest) -> None:
        if self._rounds is not None:
            self._rounds.join(peer, request)
            return
        refused = NoGroup(version=request.version, lineage=request.lineage, reason="the trainer has no process group")
        self._hub.send(peer, refused)

    def _send_chunk(self, peer: str, request: ChunkRequest) -> None:
        found = self._payloads.get(request.payload)
        if found is None or not 0 <= request.index < found.payload.num_chunks:
            self._counts["weights_refused_chunks"] += 1
            self._hub.send(peer, NoChunk(payload=request.payload, index=request.index, reason="no longer available"))
            return
        found.asked_s = time.monotonic()
        data = np.frombuffer(found.data[found.payload.span(request.index)], np.uint8)
        if self._hub.send(peer, Chunk(payload=request.payload, index=request.index, data=data)):
            self._counts["weights_sent_chunks"] += 1
            self._counts["weights_sent_bytes"] += data.nbytes

    def _parent(self, peer: str, request: ParentRequest) -> str:
        found = self._payloads.get(request.payload)
        if found is None:
            return ""
        self._payloads.move_to_end(request.payload)
        if not request.lost:
            return found.tree.join(peer, request.address)
        self._counts["weights_moved_children"] += 1
        log.warning(
            "%s lost its source %s while fetching %s; the worker will fetch from a different source",
            peer,
            request.lost,
            request.payload,
        )
        return found.tree.replace(peer, request.address, request.lost)

    async def _answer(self, peer: str, request: WayRequest) -> None:
        base = Base(request.base_version, request.base_digest) if request.base_version >= 0 else None
        try:
            payloads = await self._opened(request, base)
        except WeightError as error:
            log.warning("version %d cannot be transferred to %s: %s", request.version, peer, error)
            self._hub.send(
                peer, TransferUnavailable(version=request.version, lineage=request.lineage, reason=str(error))
            )
        else:
            for opened in payloads:
                self._keep(opened)
            way = tuple(opened.payload for opened in payloads)
            self._hub.send(peer, TransferPlan(version=request.version, lineage=request.lineage, payloads=way))
        finally:
            self._asking.discard(peer)

    # ------------------------------------------------------------ payloads

    async def _opened(self, request: WayRequest, base: Base | None) -> list[_Open]:
        """Open the payloads; opened again if files were rewritten meanwhile. Raises WeightError."""
        async with self._opening:  # two at once would compute the same checksums twice
            while True:
                num_rewrites = self._num_rewrites
                try:
                    payloads = await asyncio.to_thread(self._open_way, request.version, request.lineage, base)
                except WeightError:
                    if num_rewrites == self._num_rewrites:
                        raise
                else:
                    if num_rewrites == self._num_rewrites:
                        return payloads

    def _open_way(self, version: int, lineage: str, base: Base | None) -> list[_Open]:
        way = self._catalog.route(version, lineage, base)
        return [self._payloads.get(_payload(manifest)) or self._open(path, manifest) for path, manifest in way]

    def _open(self, path: Path, manifest: AnyManifest) -> _Open:
        path = path.with_name(_payload(manifest))
        data = map_payload(path, manifest.num_bytes)
        size = self._chunk_bytes
        crcs = [zlib.crc32(data[start : start + size]) for start in range(0, len(data), size)]
        payload = Payload(
            name=_payload(manifest),
            is_delta=isinstance(manifest, DeltaManifest),
            num_bytes=len(data),
            chunk_bytes=size,
            chunk_crcs=np.array(crcs, np.uint32),
            manifest=msgspec.json.encode(manifest),
        )
        return _Open(payload, path, data, FanOutTree(self.address, self._fan_out))

    def _keep(self, opened: _Open) -> None:
        kept = self._payloads.setdefault(opened.payload.name, opened)
        kept.asked_s = time.monotonic()
        self._payloads.move_to_end(opened.payload.name)
        for name, other in list(self._payloads.items()):
            if kept.asked_s - other.asked_s > IDLE_S and not other.path.exists():
                del self._payloads[name]
        while len(self._payloads) > MAX_PAYLOADS:
            self._payloads.popitem(last=False)

    def _forget(self, peer: str) -> None:
        self._hub.forget(peer)
        if self._rounds is not None:
            self._rounds.left(peer)
        for opened in self._payloads.values():
            opened.tree.leave(peer)

    def trees(self) -> Mapping[str, FanOutTree]:
        """Return the tree of each open payload, which shows which worker fetched from which."""
        return {name: opened.tree for name, opened in self._payloads.items()}


def stream_sender(spec: ProcessSpec, trainer: TrainerSettings) -> WeightSender:
    """Create the sender of streams."""
    return _sender(spec, trainer.weights, None)


def group_sender(spec: ProcessSpec, trainer: TrainerSettings) -> WeightSender:
    """Create the sender that forms a process group, and streams to the workers that are not in it."""

    def make_rounds(send: Send) -> GroupRounds:
        return GroupRounds(
            trainer.weights.group, run_id=spec.run_id, host=own_host(spec.hub_address), device=trainer.device, send=send
        )

    return _sender(spec, trainer.weights, make_rounds)


def _sender(
    spec: ProcessSpec, settings: WeightStoreSettings, make_rounds: Callable[[Send], GroupRounds] | None
) -> WeightSender:
    return WeightSender(
        Path(spec.weight_dir),
        run_id=spec.run_id,
        bind=f"tcp://{own_host(spec.hub_address)}:*",
        curve_dir=Path(spec.curve_dir),
        chunk_bytes=settings.chunk_kb << 10,
        fan_out=settings.fan_out,
        make_rounds=make_rounds,
    )


def _payload(manifest: AnyManifest) -> str:
    """Return the name of the payload's file, which includes version and lineage."""
    return manifest.payload
