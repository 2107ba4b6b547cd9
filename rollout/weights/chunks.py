"""A payload on its way in: the file it fills, which chunks are there, and who waits for which.

Owns: checksums of chunks, the place of each. Refuses: asking for chunks (fetching.py), sockets, what the bytes mean.
"""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from areal_like.errors import WeightError
from areal_like.weights.stream import Payload


class ChunkFile:
    """One payload, filled in any order. `path` has its full size from the start; it is mapped, not held in memory."""

    def __init__(self, path: Path, payload: Payload) -> None:
        """Raises WeightError where there is no room."""
        self.path, self.payload = path, payload
        self._has_N = np.zeros(payload.num_chunks, bool)
        self._num_missing = payload.num_chunks
        try:
            self._file = path.open("wb+", buffering=0)
            os.posix_fallocate(self._file.fileno(), 0, payload.num_bytes)  # else a full tmpfs kills us by SIGBUS later
            self._map = memoryview(mmap.mmap(self._file.fileno(), payload.num_bytes, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise WeightError(f"no room for {payload.num_bytes} bytes at {path}: {error}") from error

    @property
    def is_complete(self) -> bool:
        """Every chunk is there, and each matched its checksum."""
        return not self._num_missing

    @property
    def data(self) -> memoryview:
        """The bytes; meaningful where chunks are there."""
        return self._map

    def missing(self) -> list[int]:
        """Chunks that are not there yet, in order."""
        return [int(index) for index in np.flatnonzero(~self._has_N)]

    def chunk(self, index: int) -> np.ndarray | None:
        """The bytes of a chunk, uint8; None while it is missing. Raises WeightError for one that does not exist."""
        span = self.payload.span(index)
        return np.frombuffer(self.data[span], np.uint8) if self._has_N[index] else None

    def put(self, index: int, data: np.ndarray) -> bool:
        """Take a chunk in; False where its bytes are not what the trainer sent. Raises WeightError where it cannot be.

        Written, not copied into the map: touching a page of that for the first time takes 10 us and more with Python's
        lock held, and the engine's thread stood still for 100 to 180 ms of every version.
        """
        span = self.payload.span(index)
        is_whole = data.dtype == np.uint8 and data.shape == (span.stop - span.start,)
        if not is_whole:
            return False
        raw = np.ascontiguousarray(data).data
        if zlib.crc32(raw) != int(self.payload.chunk_crcs[index]):
            return False
        if not self._has_N[index]:
            self._write(raw, span.start)
            self._has_N[index] = True
            self._num_missing -= 1
        return True

    def _write(self, raw: memoryview, at: int) -> None:
        try:
            while raw:
                num_bytes = os.pwrite(self._file.fileno(), raw, at)
                raw, at = raw[num_bytes:], at + num_bytes
        except OSError as error:
            raise WeightError(f"{self.path}: {error}") from error
