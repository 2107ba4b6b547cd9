"""A payload that is being received: its file, the chunks that have arrived, and their checksums.

Chunks are requested in fetching.py.
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
        """Raises WeightError if there is not enough space."""
        self.path, self.payload = path, payload
        self._has_N = np.zeros(payload.num_chunks, bool)
        self._num_missing = payload.num_chunks
        try:
            self._file = path.open("wb+", buffering=0)
            os.posix_fallocate(
                self._file.fileno(), 0, payload.num_bytes
            )  # otherwise a full tmpfs would kill the process by SIGBUS later
            self._map = memoryview(mmap.mmap(self._file.fileno(), payload.num_bytes, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise WeightError(f"cannot allocate {payload.num_bytes} bytes at {path}: {error}") from error

    @property
    def is_complete(self) -> bool:
        """Whether every chunk has arrived and matched its checksum."""
        return not self._num_missing

    @property
    def data(self) -> memoryview:
        """The bytes, valid for chunks that have arrived."""
        return self._map

    def missing(self) -> list[int]:
        """Chunks that have not arrived yet, in order."""
        return [int(index) for index in np.flatnonzero(~self._has_N)]

    def chunk(self, index: int) -> np.ndarray | None:
        """The bytes of a chunk, uint8; None while it is missing. Raises WeightError for one that does not exist."""
        span = self.payload.span(index)
        return np.frombuffer(self.data[span], np.uint8) if self._has_N[index] else None

    def put(self, index: int, data: np.ndarray) -> bool:
        """Store a chunk; False if its checksum differs. Raises WeightError if it does not exist or cannot be written.

        It is written to the file and not copied into the mapping: the first access to a mapped page takes 10 us or more
        with the GIL held, which paused the engine's thread for 100 to 180 ms per version.
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
