"""Encodes messages as ZeroMQ frames and decodes them: one msgpack header, then raw buffers. No pickle.

Frames of a message: [header, pool?, large array, large array, ...]. In the header an array is a msgpack extension with
dtype, shape, frame and offset. Arrays below LARGE_BYTES share the pool frame, each starting at a multiple of ALIGNMENT;
a larger one is a separate frame and is copied neither by the sender nor by the receiver. Decoded arrays are read-only
views of the received frames: a reference to a small one keeps its whole pool in memory. A sender must not write to an
array after sending it.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Union

import msgspec
import numpy as np

from areal_like.errors import WireError
from areal_like.wire.messages import Message

Frame = bytes | memoryview

LARGE_BYTES = 65_536
"""Below this size a copy into the pool is cheaper than a frame."""
MAX_FRAME_BYTES = 1 << 18
"""Longest frame that is sent; a longer one is sent in pieces. It bounds the memory for a connection that is not
authenticated yet, for which the size of a whole message would be far too much."""
ALIGNMENT = 8
MAX_DIMENSIONS = 8
_ARRAY = 1
_DESCRIPTOR = struct.Struct("<BBIQ")
_POOL = 0

_DTYPES = ("?", "<i1", "<u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
_CODE_OF = {np.dtype(name): code for code, name in enumerate(_DTYPES)}
_DTYPE_OF = tuple(np.dtype(name) for name in _DTYPES)

# Exceptions that decoding malicious bytes may raise: msgspec's errors, RecursionError for deep nesting, and #
# exceptions of __post_init__ checks that expect other types.
_DECODE_ERRORS = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class WireLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on one incoming message. The largest legitimate one is a training batch."""

    max_frames: int = 65_536
    """Largest number of arrays; 8,192 samples with five large arrays each would need five eighths of it."""
    max_header_bytes: int = 64 << 20
    max_message_bytes: int = 4 << 30
    """Bytes of all frames together; 4 GiB is 8,192 samples of 30,000 tokens at 17 bytes."""


class _Collector:
    """Collects the arrays of one message while msgspec encodes it."""

    def __init__(self) -> None:
        self.pool: list[Frame] = []
        self.pool_bytes = 0
        self.large: list[memoryview] = []

    def hook(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._describe(value)
        if isinstance(value, np.generic):
            return value.item()
        raise NotImplementedError(f"a value of type {type(value).__name__} cannot be sent")

    def _describe(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        code = _CODE_OF.get(array.dtype)
        if code is None or array.ndim > MAX_DIMENSIONS:
            raise TypeError(f"an array of dtype {array.dtype} with {array.ndim} dimensions cannot be sent")
        if array.nbytes < LARGE_BYTES:
            frame, offset = _POOL, self.pool_bytes
            padding = -array.nbytes % ALIGNMENT
            self.pool.append(array.tobytes() + bytes(padding))
            self.pool_bytes += array.nbytes + padding
        else:
            self.large.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly())
            frame, offset = len(self.large), 0
        head = _DESCRIPTOR.pack(code, array.ndim, frame, offset)
        return msgspec.msgpack.Ext(_ARRAY, head + struct.pack(f"<{array.ndim}Q", *array.shape))


def encode(message: Message) -> list[Frame]:
    """Turn a message into frames: one of msgpack, then the buffers of its arrays.

    Args:
        message: a struct of areal_like/wire/messages.py.

    Returns:
        The frames, in the order they are sent.

    Raises:
        WireError: the message contains a value that cannot be encoded.

    Example:
        >>> from areal_like.wire.messages import Goodbye
        >>> decode(encode(Goodbye(reason="done")), frozenset({Goodbye})).reason
        'done'
    """
    collector = _Collector()
    try:
        header = msgspec.msgpack.Encoder(enc_hook=collector.hook).encode(message)
    except (NotImplementedError, TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise WireError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if not collector.pool and not collector.large:
        return [header]
    return [header, b"".join(collector.pool), *collector.large]


class _Buffers(threading.local):
    """The array frames of the message that this thread is decoding; msgspec passes no context to its hooks."""

    frames: Sequence[Frame] = ()


_buffers = _Buffers()


def _read_array(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY or len(data) < _DESCRIPTOR.size:
        raise ValueError("the message contains an unknown extension or a truncated array descriptor")
    dtype_code, num_dims, frame, offset = _DESCRIPTOR.unpack_from(data)
    if dtype_code >= len(_DTYPE_OF) or num_dims > MAX_DIMENSIONS or len(data) != _DESCRIPTOR.size + 8 * num_dims:
        raise ValueError("an array descriptor has an unknown dtype or a wrong length")
    dtype = _DTYPE_OF[dtype_code]
    shape = struct.unpack_from(f"<{num_dims}Q", data, _DESCRIPTOR.size)
    count = 1
    for size in shape:
        count *= size
    if frame >= len(_buffers.frames):
        raise ValueError(f"an array refers to frame {frame}, but the message has only {len(_buffers.frames)} frames")
    buffer = _buffers.frames[frame]
    num_bytes = count * dtype.itemsize
    if offset % ALIGNMENT or offset + num_bytes > len(buffer):
        raise ValueError("an array extends beyond its frame or is misaligned")
    array = np.frombuffer(buffer, dtype, count, offset) if count else np.zeros(0, dtype)
    if dtype_code == 0 and count and int(array.view(np.uint8).max()) > 1:
        raise ValueError("a bool array contains bytes other than 0 and 1")
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def _check_custom(wanted: type, value: Any) -> Any:
    if wanted is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise ValueError(f"expected a value of type {wanted.__name__}, got {type(value).__name__}")


@functools.lru_cache(maxsize=64)
def _decoder(accept: frozenset[type]) -> Callable[[Frame], Message]:
    assert accept, "a receiver must accept at least one type"
    wanted: Any = Union[tuple(sorted(accept, key=lambda kind: kind.__name__))]  # noqa: UP007 (built at run time)
    return msgspec.msgpack.Decoder(wanted, dec_hook=_check_custom, ext_hook=_read_array).decode


def _aligned(frame: Frame) -> Frame:
    """The frame as read-only memory, copied only if it is not aligned (small zero-copy ZeroMQ frames)."""
    address = np.frombuffer(frame, np.uint8).__array_interface__["data"][0] if len(frame) else 0
    if address % ALIGNMENT:
        return bytes(frame)
    return frame if isinstance(frame, bytes) else memoryview(frame).toreadonly()


def cut(frames: Sequence[Frame]) -> list[Frame]:
    """Frames to send: unchanged if none is longer than MAX_FRAME_BYTES, else in pieces after a table."""
    if all(len(frame) <= MAX_FRAME_BYTES for frame in frames):
        return list(frames)
    table = _PIECES + msgspec.msgpack.encode([len(frame) for frame in frames])
    pieces: list[Frame] = [table]
    for frame in frames:
        view = memoryview(frame)
        pieces += [view[start : start + MAX_FRAME_BYTES] for start in range(0, len(view) or 1, MAX_FRAME_BYTES)]
    return pieces


def join(pieces: Sequence[Frame], limits: WireLimits) -> list[Frame]:
    """Inverse of `cut`; frames that were sent whole are not copied. Raises WireError for invalid pieces."""
    if not pieces or bytes(pieces[0][:1]) != _PIECES:
        return list(pieces)
    max_pieces = limits.max_frames + limits.max_message_bytes // MAX_FRAME_BYTES + 1
    if len(pieces) > max_pieces or sum(map(len, pieces)) > limits.max_message_bytes:
        raise WireError(
            f"a message of {len(pieces)} pieces and {sum(map(len, pieces))} bytes exceeds the limit of {max_pieces} "
            f"pieces or {limits.max_message_bytes} bytes"
        )
    try:
        sizes = _TABLE.decode(pieces[0][1:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"the table of a message in several pieces is invalid: {error}") from error
    frames: list[Frame] = []
    at = 1
    for size in sizes:
        num_pieces = max(1, -(-size // MAX_FRAME_BYTES))
        parts = pieces[at : at + num_pieces]
        at += num_pieces
        if sum(map(len, parts)) != size:
            raise WireError("the pieces of a message do not match its table")
        frames.append(parts[0] if len(parts) == 1 else b"".join(parts))
    if at != len(pieces):
        raise WireError("the message has more pieces than its table lists")
    return frames


def decode(frames: Sequence[Frame], accept: frozenset[type], limits: WireLimits | None = None) -> Message:
    """Turn frames into a message.

    Args:
        frames: the frames that `encode` returned.
        accept: types of messages that the receiver handles; others are refused before they are built.
        limits: bounds of sizes and counts; None for the defaults.

    Returns:
        The message, of one of the types in `accept`.

    Raises:
        WireError: the frames are not such a message.

    Example:
        >>> from areal_like.wire.messages import Goodbye, Shutdown
        >>> decode(encode(Goodbye(reason="")), frozenset({Shutdown}))
        Traceback (most recent call last):
        ...
        areal_like.errors.WireError: ...
    """
    limits = limits or _DEFAULT_LIMITS
    if not frames or len(frames) > limits.max_frames:
        raise WireError(f"the message has {len(frames)} frames, expected 1 to {limits.max_frames}")
    if len(frames[0]) > limits.max_header_bytes or sum(map(len, frames)) > limits.max_message_bytes:
        raise WireError(
            f"a message of {sum(map(len, frames))} bytes with a header of {len(frames[0])} bytes exceeds the limit of "
            f"{limits.max_message_bytes} bytes, or of {limits.max_header_bytes} bytes for the header"
        )
    decoder = _decoder(accept)
    try:
        _buffers.frames = [_aligned(frame) for frame in frames[1:]]
        return decoder(frames[0])
    except _DECODE_ERRORS as error:
        raise WireError(f"the message is invalid: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        _buffers.frames = ()


_DEFAULT_LIMITS = WireLimits()
_PIECES = b"\xc1"
"""First byte of a message in pieces; msgpack never uses it."""
_TABLE = msgspec.msgpack.Decoder(list[int])
