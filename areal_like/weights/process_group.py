"""Protocol between the trainer and the rollout workers for weights that are sent through a process group.

It contains the messages that gather a group, the division of a payload into buckets, and the names in the group's
store. It does not import torch; the trainer decides who joins in trainer/weights/group_rounds.py.

    rollout -> trainer   JoinRequest      trainer -> rollout   GroupCall or NoGroup

A group is never repaired: if its members change, or anything in it fails, the next version uses a new group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from areal_like.weights.payload_layout import TensorEntry
from areal_like.weights.weight_store import WeightManifest
from areal_like.wire.messages import Message

GroupBackend = Literal["gloo", "nccl"]


class JoinRequest(Message, frozen=True, kw_only=True):
    """The sender can receive this version through the group now. `num_ranks`: ranks of its engine (one per GPU of a
    server)."""

    version: int
    lineage: str
    num_ranks: int = 1
    device: Literal["cpu", "cuda"] = "cpu"


class GroupCall(Message, frozen=True, kw_only=True):
    """Request to join: meet the others at `host` and `port`, pause generation, receive the payload, and check it.

    `rank` is the first rank of the receiver. `is_new`: the group has to be formed; otherwise the receiver is in it, or
    cannot use it. `manifest`: JSON of the version's WeightManifest. `deadline_s`: for forming the group, and again for
    the payload.
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
    """This version is not sent to the receiver through a group: fetch it as a stream."""

    version: int
    lineage: str
    reason: str


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Adjacent tensors of the payload that are sent as one message of `num_bytes` from byte `offset`."""

    offset: int
    num_bytes: int
    entries: tuple[TensorEntry, ...]


def buckets(manifest: WeightManifest, bucket_bytes: int) -> Iterator[Bucket]:
    """Divide the payload into buckets of whole tensors of about `bucket_bytes`; a larger tensor is a separate bucket.

    The payload has no gaps (safetensors), so a bucket consists of exactly its tensors.
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
    """Prefixes of the keys of a group's store, outermost first, as in torch and SGLang."""
    return group, f"{group}/"
