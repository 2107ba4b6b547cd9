"""Shared memory in which an environment process marks which episode's code runs, and since when.

A process that hangs or dies cannot report which episode caused it. The service reads it here, so that only the episode
at fault fails. Fields are written one after the other, the episode last, and only the service reads them; a reading
that changes meanwhile comes from a process that is running.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

_LAYOUT = struct.Struct("<QdQQQQ")
_SIZE = mmap.PAGESIZE
NOBODY = 0
"""No episode's code runs; episodes count from 1."""


class Mark(NamedTuple):
    """One reading. calls: number of calls so far. used_bytes: memory of the process when the call began. heaviest: the
    episode for which the process grew most, and by how many bytes."""

    episode: int
    since_s: float
    calls: int
    used_bytes: int
    heaviest: int
    heaviest_bytes: int


class Marker:
    """A page shared by two processes through a descriptor."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _SIZE)
        self._calls = self._heaviest = self._heaviest_bytes = 0

    @staticmethod
    def make() -> tuple[Marker, int]:
        """Create a marker, and the descriptor to pass to the child, which the caller closes."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("environment-marker")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return Marker(fd), fd

    def enter(self, episode: int, used_bytes: int) -> None:
        """Record that the episode's code begins to run."""
        self._calls += 1
        self._write(NOBODY, used_bytes)
        self._write(episode, used_bytes)

    def leave(self) -> None:
        """Record that no episode's code runs."""
        self._write(NOBODY, 0)

    def heaviest(self, episode: int, num_bytes: int) -> None:
        """Record the episode for which the process grew most; called between calls."""
        self._heaviest, self._heaviest_bytes = episode, max(num_bytes, 0)
        self._write(NOBODY, 0)

    def look(self) -> Mark:
        """Read the marker."""
        return Mark(*_LAYOUT.unpack_from(self._page))

    def close(self) -> None:
        """Unmap."""
        self._page.close()

    def _write(self, episode: int, used_bytes: int) -> None:
        _LAYOUT.pack_into(
            self._page, 0, episode, time.monotonic(), self._calls, used_bytes, self._heaviest, self._heaviest_bytes
        )
