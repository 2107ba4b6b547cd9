"""Length-prefixed msgpack between a service and its child processes; no pickle.

This is the frame and the blocking end in the child. Each service defines its message types.
"""

from __future__ import annotations

import os
import socket
import struct

import msgspec

PREFIX = struct.Struct(">I")
MAX_ANSWER_BYTES = 1 << 20
"""Longest message that a process may send to its service."""

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as bytes, prefixed with its length."""
    body = _encoder.encode(message)
    return PREFIX.pack(len(body)) + body


class FrameStream:
    """Blocking frames over the inherited socket `fd`."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        os.set_inheritable(fd, False)

    def receive_frame(self) -> bytes | None:
        """The next body; None at the end of the stream."""
        prefix = self._exactly(PREFIX.size)
        return self._exactly(PREFIX.unpack(prefix)[0]) if prefix is not None else None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message completely."""
        self._socket.sendall(frame(message))

    def _exactly(self, num_bytes: int) -> bytes | None:
        chunks = bytearray()
        while len(chunks) < num_bytes:
            chunk = self._socket.recv(min(num_bytes - len(chunks), 1 << 20))
            if not chunk:
                return None
            chunks += chunk
        return bytes(chunks)
