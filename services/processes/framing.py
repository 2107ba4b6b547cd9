"""Length-prefixed msgpack between a service and a process that it starts; no pickle.

Owns: the frame, the blocking end of the stream in the process. Refuses: message types (each service's own), the other
end (asyncio streams).
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
    """A message as bytes, its length in front."""
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
        """Send it whole."""
        self._socket.sendall(frame(message))

    def _exactly(self, num_bytes: int) -> bytes | None:
        chunks = bytearray()
        while len(chunks) < num_bytes:
            chunk = self._socket.recv(min(num_bytes - len(chunks), 1 << 20))
            if not chunk:
                return None
            chunks += chunk
        return bytes(chunks)
