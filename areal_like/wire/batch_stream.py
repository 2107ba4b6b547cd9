"""Batches in a byte stream (a pipe or a file): a table of sizes, then the frames of encoding.py. No pickle.

A record is the length of the table (u32, little-endian), the table (msgpack, bytes of each frame), and the frames.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from areal_like.errors import WireError
from areal_like.wire.encoding import WireLimits, decode, encode
from areal_like.wire.messages import Batch

_HEAD = struct.Struct("<I")
_MAX_TABLE_BYTES = 1 << 20


def write_batch(stream: BinaryIO, batch: Batch) -> None:
    """Append one batch. Raises WireError if it cannot be encoded, OSError if the stream cannot be written."""
    frames = encode(batch)
    table = msgspec.msgpack.encode([len(frame) for frame in frames])
    for part in (_HEAD.pack(len(table)), table, *frames):
        stream.write(part)
    stream.flush()


def read_batch(stream: BinaryIO) -> Batch:
    """Read the next batch. Raises WireError if the stream ends early or holds something else."""
    (size,) = _HEAD.unpack(_read(stream, _HEAD.size))
    if size > _MAX_TABLE_BYTES:
        raise WireError("the data is not a stream of batches")
    try:
        sizes = msgspec.msgpack.decode(_read(stream, size), type=list[int])
    except msgspec.MsgspecError as error:
        raise WireError(f"the data is not a stream of batches ({error})") from error
    if min(sizes, default=-1) < 0 or sum(sizes) > WireLimits().max_message_bytes:
        raise WireError("the data is not a stream of batches")
    batch = decode([_read(stream, one) for one in sizes], frozenset({Batch}))
    assert isinstance(batch, Batch)
    return batch


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) != num_bytes:
        raise WireError("the stream of batches ends early")
    return data
