"""A payload that is filled chunk by chunk: only bytes that the trainer sent, each at its place."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from areal_like.errors import WeightError
from areal_like.weights.stream import Payload
from rollout.weights.chunks import ChunkFile

CONTENT = b"abcdefghij"
"""In chunks of 4, 4 and 2 bytes."""
CHUNKS = [CONTENT[:4], CONTENT[4:8], CONTENT[8:]]


def bytes_of(chunk: bytes) -> np.ndarray:
    return np.frombuffer(chunk, np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> ChunkFile:
    crcs = np.array([zlib.crc32(chunk) for chunk in CHUNKS], np.uint32)
    payload = Payload(name="p", is_delta=False, num_bytes=len(CONTENT), chunk_bytes=4, chunk_crcs=crcs, manifest=b"{}")
    return ChunkFile(tmp_path / "p", payload)


def test_chunks_may_come_in_any_order_and_again(file: ChunkFile) -> None:
    assert (file.missing(), file.is_complete) == ([0, 1, 2], False)
    for index, missing in ((2, [0, 1]), (0, [1]), (0, [1])):
        assert file.put(index, bytes_of(CHUNKS[index])) is True
        assert file.missing() == missing
    assert file.chunk(1) is None
    chunk = file.chunk(2)
    assert chunk is not None
    assert chunk.tobytes() == b"ij"
    assert not file.is_complete
    file.put(1, bytes_of(CHUNKS[1]))
    assert file.is_complete
    assert bytes(file.data) == CONTENT
    assert file.path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "data",
    [
        bytes_of(b"abcX"), bytes_of(b"abc"), bytes_of(b"abcde"), bytes_of(b"abcd").view(np.int32),
        bytes_of(b"abcd").view(np.int8), bytes_of(b"abcd").reshape(2, 2),
    ],
    ids=lambda data: f"{data.dtype}{data.shape}",
)  # fmt: skip
def test_a_chunk_of_other_bytes_or_another_form_is_not_taken(file: ChunkFile, data: np.ndarray) -> None:
    assert file.put(0, data) is False
    assert file.missing() == [0, 1, 2]


def test_bytes_that_do_not_lie_side_by_side_are_taken_as_they_are_read(file: ChunkFile) -> None:
    assert file.put(0, bytes_of(b"a-b-c-d-")[::2]) is True
    assert bytes(file.data)[:4] == b"abcd"


def test_a_chunk_that_does_not_exist_is_an_error(file: ChunkFile) -> None:
    for index in (-1, 3):
        with pytest.raises(WeightError, match=f"has no chunk {index}"):
            file.put(index, bytes_of(b"ij"))
        with pytest.raises(WeightError):
            file.chunk(index)


def test_a_write_that_the_system_cuts_short_is_completed(file: ChunkFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, bytes(data)[:3], at))
    for index, chunk in enumerate(CHUNKS):
        file.put(index, bytes_of(chunk))
    assert bytes(file.data) == CONTENT


def test_a_disk_that_refuses_is_an_error_and_the_chunk_stays_missing(
    file: ChunkFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object, at: int) -> int:
        raise OSError("disk full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WeightError, match="disk full"):
        file.put(0, bytes_of(CHUNKS[0]))
    assert file.missing() == [0, 1, 2]
