"""Protocol between the trainer and the rollout workers for weights that are sent through sockets.

It contains the messages, the chunk arithmetic and the location of a version (`Locator`). The trainer assigns parents in
trainer/weights/fan_out.py; process groups are in process_group.py.

    rollout -> trainer   WayRequest, ParentRequest  trainer -> rollout  TransferPlan, TransferUnavailable, UpstreamPeer
    rollout -> trainer or rollout worker (its parent)   ChunkRequest
    trainer or rollout worker -> rollout                Chunk, NoChunk

Receivers pull: each one requests as many chunks as it has room for, so none is overloaded, and chunks that were lost
with a connection are requested again, from the same parent or another one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import numpy as np

from areal_like.errors import WeightError
from areal_like.weights.process_group import GroupCall, JoinRequest, NoGroup
from areal_like.wire.messages import Message

WINDOW_CHUNKS = 8
"""Largest number of chunks that a receiver has requested and not received; times the chunk size, it bounds the data in
flight."""


class Locator(NamedTuple):
    """Location of a version: the trainer's address, version and lineage. `by_group`: the trainer also sends it to all
    workers at once through a process group, to those that join in time.
    """

    address: str
    version: int
    lineage: str
    by_group: bool = False

    def __str__(self) -> str:
        return f"{'group+' * self.by_group}{self.address}/v{self.version:08d}-{self.lineage}"

    @classmethod
    def parse(cls, text: str) -> Locator | None:
        """Parse a location; None if `text` is not one (then it is the path of a manifest)."""
        found = re.fullmatch(r"(group\+)?(tcp://[^/]+)/v(\d{8,})-([\w.-]{1,64})", text)
        return cls(found[2], int(found[3]), found[4], by_group=bool(found[1])) if found else None


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """One file that is sent in chunks: a full payload or a delta.

    manifest: JSON of its WeightManifest or DeltaManifest. chunk_crcs: uint32 CRC-32 of each chunk; the last chunk may
    be shorter than `chunk_bytes`.
    """

    name: str
    is_delta: bool
    num_bytes: int
    chunk_bytes: int
    chunk_crcs: np.ndarray
    manifest: bytes

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or self.chunk_bytes < 1 or not re.fullmatch(r"[\w.-]{1,128}", self.name):
            raise ValueError(
                f"invalid payload {self.name!r} of {self.num_bytes} bytes in chunks of {self.chunk_bytes}: sizes must "
                "be positive, and the name must be a file name"
            )
        if self.chunk_crcs.dtype != np.uint32 or self.chunk_crcs.shape != (self.num_chunks,):
            raise ValueError(
                f"payload {self.name}: expected {self.num_chunks} uint32 checksums, got {self.chunk_crcs.dtype} with "
                f"shape {self.chunk_crcs.shape}"
            )

    @property
    def num_chunks(self) -> int:
        """num_bytes / chunk_bytes, rounded up."""
        return -(-self.num_bytes // self.chunk_bytes)

    def span(self, index: int) -> slice:
        """Bytes of a chunk. Raises WeightError for one that does not exist."""
        if not 0 <= index < self.num_chunks:
            raise WeightError(f"the payload {self.name} has no chunk {index}")
        start = index * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.num_bytes))


class WayRequest(Message, frozen=True, kw_only=True):
    """Request for the files that lead to a version. `base_version` and `base_digest`: the version that the sender has;
    -1: none."""

    version: int
    lineage: str
    base_version: int = -1
    base_digest: str = ""


class TransferPlan(Message, frozen=True, kw_only=True):
    """Files to fetch and to apply in this order."""

    version: int
    lineage: str
    payloads: tuple[Payload, ...]


class TransferUnavailable(Message, frozen=True, kw_only=True):
    """The version does not exist (any more)."""

    version: int
    lineage: str
    reason: str


class ParentRequest(Message, frozen=True, kw_only=True):
    """Request for a parent to fetch a payload from. `address`: where the sender serves it to others. `lost`: the parent
    that failed."""

    payload: str
    address: str
    lost: str = ""


class UpstreamPeer(Message, frozen=True, kw_only=True):
    """Fetch the payload from this address; empty: it is no longer available."""

    payload: str
    address: str


class ChunkRequest(Message, frozen=True, kw_only=True):
    """Request for one chunk; answered as soon as the parent has it itself."""

    payload: str
    index: int


class Chunk(Message, frozen=True, kw_only=True):
    """The bytes of one chunk, uint8."""

    payload: str
    index: int
    data: np.ndarray


class NoChunk(Message, frozen=True, kw_only=True):
    """The parent does not have the payload (any more), or has too many waiting requests: request another parent."""

    payload: str
    index: int
    reason: str


TO_TRAINER: frozenset[type] = frozenset({WayRequest, ParentRequest, ChunkRequest, JoinRequest})
FROM_TRAINER: frozenset[type] = frozenset(
    {TransferPlan, TransferUnavailable, UpstreamPeer, Chunk, NoChunk, GroupCall, NoGroup}
)
TO_RELAY: frozenset[type] = frozenset({ChunkRequest})
FROM_RELAY: frozenset[type] = frozenset({Chunk, NoChunk})
