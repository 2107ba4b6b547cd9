"""Messages with one process in a sandbox: length-prefixed bytes both ways, within the limits of its run.

The meaning of the bytes is in judge.py. They come from code of a row or of a model, and are never executed here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from services.reward.sandbox.cell import Cell
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Run, Stopped, words_for

LENGTH_BYTES = 4
CHUNK_BYTES = 1 << 16
_LAST_WORDS_S = 0.5


class Over(Exception):
    """The process ended, was stopped at a limit, or broke the protocol. `why` is a message."""

    def __init__(self, why: str, *, is_stopped: bool = False) -> None:
        self.why, self.is_stopped = why, is_stopped
        super().__init__(why)


class Exchange:
    """A run of a cell with a channel to its process. Call `send` and `receive`, then `close`, which does not close the
    cell."""

    def __init__(self, cell: Cell, mode: str, limits: Limits, deadline: Deadline, room_s: float = 0.0) -> None:
        """Begin the run. `room_s`: own seconds in addition to those of `deadline`. Raises SandboxFailed."""
        self.run = Run(cell, limits, deadline, room_s)
        self._max_bytes = limits.max_output_bytes
        self._channel = _begin(cell, mode)

    def send(self, body: bytes) -> None:
        """Send one message. Raises Over, SandboxFailed."""
        rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
        while rest:
            self._wait(select.POLLOUT)
            try:
                rest = rest[self._channel.send(rest[:CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Over("it closed its connection") from None

    def receive(self) -> bytes:
        """The next message. Raises Over, SandboxFailed."""
        length = int.from_bytes(self._exactly(LENGTH_BYTES), "big")
        if length > self._max_bytes:
            raise Over(f"its reply is longer than {self._max_bytes >> 10} kB")
        return self._exactly(length)

    def has_unread(self) -> bool:
        """Whether there is an unread message."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        return False

    def close(self) -> None:
        """Close this end of the channel. The cell must still exist, because the time of the run is charged now."""
        self.run.settle()
        self._channel.close()

    def _exactly(self, num_bytes: int) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            self._wait(select.POLLIN)
            try:
                chunk = self._channel.recv(min(num_bytes - len(content), 1 << 20))
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            if not chunk:
                raise self._ended()
            content += chunk
        return bytes(content)

    def _wait(self, event: int) -> None:
        try:
            if self.run.wait({self._channel.fileno(): event}):
                return
        except Stopped as stopped:
            raise Over(stopped.why, is_stopped=True) from None
        if event != select.POLLIN or not self.has_unread():  # its last message may still be in the channel
            raise self._ended()

    def _ended(self) -> Over:
        give_up_s = time.monotonic() + _LAST_WORDS_S  # the channel may close shortly before the process exits
        try:
            while self.run.status is None and time.monotonic() < give_up_s:
                self.run.wait({})
        except Stopped as stopped:
            return Over(stopped.why, is_stopped=True)
        status = self.run.status
        return Over(
            "it closed its connection" if status is None else f"it ended early ({words_for(status, self.run.limits)})"
        )


def _begin(cell: Cell, mode: str) -> socket.socket:
    """Start a process of the cell's program: its channel is a socket, its standard streams are /dev/null."""
    ours, theirs = socket.socketpair()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        cell.begin(mode, [nothing, nothing, nothing, theirs.fileno()])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(nothing)
    ours.setblocking(False)
    return ours
