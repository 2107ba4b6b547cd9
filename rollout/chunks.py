"""A parcel on its way in: the file it fills, which chunks are there, and who waits for which.

Owns: checksums of chunks, the place of each. Refuses: asking for chunks (fetching.py), sockets, what the bytes mean.
"""

from __future__ import annotations

import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from areal_like.errors import WeightError
from areal_like.weights_stream import Parcel


class ChunkFile:
    """One parcel, filled in any order. `path` has its full size from the start; it is mapped, not held in memory."""

    def __init__(self, path: Path, parcel: Parcel) -> None:
        """Raises WeightError where there is no room."""
        self.path, self.parcel = path, parcel
        self._has_N = np.zeros(parcel.num_chunks, bool)
        self._num_missing = parcel.num_chunks
        try:
            with path.open("wb+") as file:
                os.posix_fallocate(file.fileno(), 0, parcel.num_bytes)  # else a full tmpfs kills us by SIGBUS later
                self._map = memoryview(mmap.mmap(file.fileno(), parcel.num_bytes))
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise WeightError(f"no room for {parcel.num_bytes} bytes at {path}: {error}") from error

    @property
    def is_complete(self) -> bool:
        """Every chunk is there, and each matched its checksum."""
        return not self._num_missing

    @property
    def data(self) -> memoryview:
        """The bytes; meaningful where chunks are there."""
        return self._map.toreadonly()

    def missing(self) -> list[int]:
        """Chunks that are not there yet, in order."""
        return [int(index) for index in np.flatnonzero(~self._has_N)]

    def chunk(self, index: int) -> np.ndarray | None:
        """The bytes of a chunk, uint8; None while it is missing. Raises WeightError for one that does not exist."""
        span = self.parcel.span(index)
        return np.frombuffer(self.data[span], np.uint8) if self._has_N[index] else None

    def put(self, index: int, data: np.ndarray) -> bool:
        """Take a chunk in; False where its bytes are not what the trainer sent."""
        span = self.parcel.span(index)
        is_whole = data.dtype == np.uint8 and data.shape == (span.stop - span.start,)
        if not is_whole:
            return False
        raw = np.ascontiguousarray(data).data
        if zlib.crc32(raw) != int(self.parcel.chunk_crcs[index]):
            return False
        if not self._has_N[index]:
            self._map[span] = raw
            self._has_N[index] = True
            self._num_missing -= 1
        return True
