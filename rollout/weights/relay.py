"""Serves payloads that this worker fetches to other workers, so that the trainer sends a constant number of copies.

Fetching is in fetching.py; the trainer assigns workers to parents.

One loop, `run`, waits for requests of other workers. A request for a chunk that has not arrived yet waits (at most
MAX_WAITING of them); `arrived` answers it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from areal_like.errors import WeightError
from areal_like.transport.channel import Hub
from areal_like.weights.stream import TO_RELAY, WINDOW_CHUNKS, Chunk, ChunkRequest, NoChunk
from rollout.weights.chunks import ChunkFile

RECEIVE_S = 0.5
MAX_WAITING = 64 * WINDOW_CHUNKS
"""Number of requests that may wait for chunks: far more than the windows of all children."""


class Relay:
    """`start`, then `run` indefinitely; `close` at the end."""

    def __init__(self, *, run_id: str, bind: str, curve_dir: Path) -> None:
        self._hub = Hub(run_id=run_id, role="rollout", bind=bind, curve_dir=curve_dir, accept=TO_RELAY)
        self._files: dict[str, ChunkFile] = {}
        self._waiting: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.address = ""
        self.counters = {"relayed_chunks": 0.0, "relayed_bytes": 0.0}

    async def start(self) -> None:
        """Bind. Raises UserError."""
        self.address = await self._hub.start()

    async def run(self) -> None:
        """Serve until cancelled by the worker."""
        while True:
            received = await self._hub.receive(RECEIVE_S)
            if received is not None and isinstance(received[1], ChunkRequest):
                self._take(received[0], received[1])

    async def close(self) -> None:
        """Close the hub."""
        await self._hub.close()

    def offer(self, file: ChunkFile) -> None:
        """Offer this payload to other workers."""
        self._files[file.payload.name] = file

    def keep_only(self, payloads: frozenset[str]) -> None:
        """Drop all other payloads; a mapped file uses memory until then."""
        for name in self._files.keys() - payloads:
            self.withdraw(name, "too old")

    def withdraw(self, payload: str, reason: str) -> None:
        """Stop offering this payload; others must fetch it from another parent."""
        self._files.pop(payload, None)
        for key in [key for key in self._waiting if key[0] == payload]:
            for peer in self._waiting.pop(key):
                self._hub.send(peer, NoChunk(payload=payload, index=key[1], reason=reason))

    def arrived(self, file: ChunkFile, index: int) -> None:
        """Send a chunk that has arrived to the workers that wait for it."""
        for peer in self._waiting.pop((file.payload.name, index), ()):
            self._send(peer, file, index)

    def _take(self, peer: str, request: ChunkRequest) -> None:
        file = self._files.get(request.payload)
        reason = "the file is not on this worker" if file is None else ""
        if file is not None:
            try:
                is_here = file.chunk(request.index) is not None
            except WeightError as error:
                reason = str(error)
            else:
                if is_here:
                    self._send(peer, file, request.index)
                    return
                if sum(map(len, self._waiting.values())) < MAX_WAITING:
                    self._waiting[request.payload, request.index].add(peer)
                    return
                reason = "too many requests are waiting on this worker"
        self._hub.send(peer, NoChunk(payload=request.payload, index=request.index, reason=reason))

    def _send(self, peer: str, file: ChunkFile, index: int) -> None:
        data = file.chunk(index)
        assert data is not None, "a chunk that has just come"
        if self._hub.send(peer, Chunk(payload=file.payload.name, index=index, data=data)):
            self.counters["relayed_chunks"] += 1
            self.counters["relayed_bytes"] += data.nbytes
