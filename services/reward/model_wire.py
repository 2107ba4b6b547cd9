"""Messages between a scorer and the process of its model: length-prefixed msgpack over a socket, no pickle.

One request at a time per connection. One request at a time per connection.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from areal_like.errors import OperationError

PREFIX = struct.Struct(">I")
MAX_BYTES = 256 << 20
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0
"""Timeout for a scoring process without a service; normally the service kills it long before."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One text. messages: a conversation, used instead of `text` if the tokenizer has a chat template.

    answer, ends: for models that score tokens: positions of the scores, in characters of the answer.
    """

    text: str = ""
    messages: list[dict[str, Any]] | None = None
    answer: str = ""
    ends: list[int] = []


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one Item: one for a text, one per `ends` for a model that scores tokens. num_cut: number of omitted
    tokens."""

    values: list[float]
    num_cut: int = 0
    problem: str = ""
    """Why there are no scores."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of all items of a request, or why the model failed."""

    scores: list[Scores] = []
    failure: str = ""


_items = msgspec.msgpack.Decoder(list[Item])
_reply = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


class ModelFailed(OperationError):
    """The model's process has exited, or failed on these texts; the request is retried."""


class ModelClient:
    """Call `score` from one thread. A lost connection is made again, because the model's process may have been
    restarted.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def score(self, items: list[Item]) -> list[Scores]:
        """Score items. Raises ModelFailed."""
        try:
            if self._socket is None:
                self._socket = _connected(self._path)
            send(self._socket, items)
            body = receive(self._socket)
        except OSError as error:
            self._drop()
            raise ModelFailed(f"the reward model's process does not respond ({error})") from error
        if body is None:
            self._drop()
            raise ModelFailed("the reward model's process ended")
        reply = _reply.decode(body)
        if reply.failure:
            raise ModelFailed(reply.failure)
        return reply.scores

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(CONNECT_TIMEOUT_S)
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    made.settimeout(ANSWER_TIMEOUT_S)
    return made


def decode_items(body: bytes) -> list[Item]:
    """Decode items. Raises msgspec.MsgspecError."""
    return _items.decode(body)


def send(stream: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError."""
    body = _encoder.encode(message)
    stream.sendall(PREFIX.pack(len(body)) + body)


def receive(stream: socket.socket) -> bytes | None:
    """The next message's bytes; None at the end of the stream. Raises OSError, also for a message that is too long."""
    prefix = _exactly(stream, PREFIX.size)
    if prefix is None:
        return None
    length = PREFIX.unpack(prefix)[0]
    if length > MAX_BYTES:
        raise OSError(f"the message is too long: {length} bytes (limit {MAX_BYTES})")
    return _exactly(stream, length)


def _exactly(stream: socket.socket, num_bytes: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < num_bytes:
        chunk = stream.recv(min(num_bytes - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
