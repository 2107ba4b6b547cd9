"""What the trainer and the rollout workers agree on when weights travel through a process group.

Owns: the messages that gather a group, how a payload is cut into buckets, the names in the group's store. Refuses:
torch (each package opens its own end), who may join (trainer/weights/group_rounds.py), the pause (the engines).

    rollout -> trainer   JoinRequest      trainer -> rollout   GroupCall or NoGroup

A group is never repaired: when its members change, or anything in it fails, the next version gets another group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from areal_like.weights.weight_store import TensorEntry, WeightManifest
from areal_like.wire.messages import Message

GroupBackend = Literal["gloo", "nccl"]


class JoinRequest(Message, frozen=True, kw_only=True):
    """I can take this version by the group now. `num_ranks`: places my engine takes (one per GPU of a server)."""

    version: int
    lineage: str
    num_ranks: int = 1
    device: Literal["cpu", "cuda"] = "cpu"


class GroupCall(Message, frozen=True, kw_only=True):
    """Come now: meet the others where `host` and `port` say, stand still, take the payload, and check it.

    `rank` is the first of your places. `is_new`: the group has to be met; otherwise you are in it, or else it is lost
    to you. `manifest`: JSON of the version's WeightManifest. `deadline_s`: for meeting, and again for the payload.
    """

    version: int
    lineage: str
    group: str
    is_new: bool
    host: str
    port: int
    rank: int
    size: int
    backend: GroupBackend
    bucket_bytes: int
    deadline_s: float
    manifest: bytes


class NoGroup(Message, frozen=True, kw_only=True):
    """This version does not come to you by a group: take it as a stream."""

    version: int
    lineage: str
    reason: str


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that lie side by side in the payload and travel as one message of `num_bytes` from byte `offset`."""

    offset: int
    num_bytes: int
    entries: tuple[TensorEntry, ...]


def buckets(manifest: WeightManifest, bucket_bytes: int) -> Iterator[Bucket]:
    """The payload as whole tensors in buckets of about `bucket_bytes`; a larger tensor is a bucket of its own.

    The payload has no gaps (safetensors), so a bucket is also exactly its tensors one after another.
    """
    entries: list[TensorEntry] = []
    num_bytes = 0
    for entry in manifest.tensors:
        if entries and num_bytes + entry.num_bytes > bucket_bytes:
            yield _bucket(entries)
            entries, num_bytes = [], 0
        if entry.num_bytes:
            entries.append(entry)
            num_bytes += entry.num_bytes
    if entries:
        yield _bucket(entries)


def _bucket(entries: Sequence[TensorEntry]) -> Bucket:
    start = entries[0].offset
    num_bytes = sum(entry.num_bytes for entry in entries)
    assert entries[-1].offset + entries[-1].num_bytes == start + num_bytes, "a payload with gaps"
    return Bucket(offset=start, num_bytes=num_bytes, entries=tuple(entries))


def store_prefixes(group: str) -> tuple[str, ...]:
    """What the keys of a group's store begin with, outermost first: torch's own habit, which SGLang's servers keep."""
    return group, f"{group}/"
