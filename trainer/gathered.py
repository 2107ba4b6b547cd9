"""All tensors of a state whose parts are in the copies of several ranks, read on rank 0 in pieces of bounded size.

Rank 0's own parts are read from its copy; those of other ranks are requested (part_channel.py) into one buffer that is
used again for each piece. Files are written from it in weights/tensor_file.py and the weight store; nothing here holds
a full model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from areal_like.weights.payload_layout import Chunk, TensorLayout
from areal_like.weights.tensor_parts import Range, are_complete, arranged
from trainer.host_copy import Copied, Place
from trainer.part_channel import PartChannel
from trainer.peer_errors import RankLost

JOINED_SHARE = 4
"""Pieces of rows whose columns are on several ranks are this part of a bucket."""


class GatheredTensors(Mapping[str, torch.Tensor]):
    """Tensors by key, assembled one at a time when read. `chunks` gives their bytes without assembling them.

    Create it with `gathered`. Valid until the context of that ends.
    """

    def __init__(self, source: _Source, keys: Mapping[str, str]) -> None:
        """keys: the key in the copies, by the key here."""
        self._source, self._keys = source, dict(keys)

    def select(self, rename: Callable[[str], str | None]) -> GatheredTensors:
        """Return those tensors for which `rename` returns a key, by that key."""
        renamed = {rename(key): inner for key, inner in self._keys.items()}
        return GatheredTensors(self._source, {key: inner for key, inner in renamed.items() if key is not None})

    @property
    def layout(self) -> dict[str, TensorLayout]:
        """Dtype and shape of every tensor."""
        return {key: self._source.layout[inner] for key, inner in self._keys.items()}

    @contextlib.contextmanager
    def chunks(self, keys: Sequence[str]) -> Iterator[Iterator[Chunk]]:
        """Iterate over the bytes of tensors in the given order. A chunk is valid until the next one."""
        outer = {self._keys[key]: key for key in keys}
        with self._source.chunks([self._keys[key] for key in keys]) as found:
            yield ((outer[inner], data) for inner, data in found)

    def __getitem__(self, key: str) -> torch.Tensor:
        layout = self._source.layout[self._keys[key]]
        tensor = torch.empty(layout.shape, dtype=getattr(torch, layout.dtype))
        flat_U, start = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, 0
        with self.chunks([key]) as found:
            for _, data in found:
                flat_U[start : start + len(data)] = torch.frombuffer(data, dtype=torch.uint8)
                start += len(data)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@contextlib.contextmanager
def gathered(own: Copied, channel: PartChannel | None, bucket_bytes: int) -> Iterator[GatheredTensors]:
    """Read the copies of all ranks, on rank 0; the others run `PartChannel.serve`. channel: None if there are none.

    bucket_bytes: size of the largest piece. Raises RankLost. If the context ends by another error, the other ranks may
    serve again.
    """
    own.wait()
    ranks = range(1, channel.size) if channel is not None else ()
    copies: list[Sequence[Place]] = [own.places]
    for rank in ranks:
        assert channel is not None
        copies.append(channel.layout(rank))
    source = _Source(own, copies, channel, bucket_bytes)
    is_lost = False
    try:
        yield GatheredTensors(source, {key: key for key in source.layout})
    except RankLost:
        is_lost = True
        raise
    finally:
        for rank in ranks if not is_lost else ():
            assert channel is not None
            channel.ask(rank, ())


class _Span(NamedTuple):
    """A range of bytes of one rank's copy."""

    rank: int
    offset: int
    num_bytes: int


class _Piece(NamedTuple):
    """A range of bytes of the tensor `key`: one span, or several with the columns of the same `rows` rows, in order."""

    key: str
    spans: tuple[_Span, ...]
    rows: int = 0


def _spans(bucket: Sequence[_Piece], rank: int) -> list[tuple[int, int]]:
    return [(span.offset, span.num_bytes) for piece in bucket for span in piece.spans if span.rank == rank]


_Band = list[tuple[int, Place]]
"""A part with its rank, or the parts of the same rows, by columns."""


def _range(part: tuple[int, Place]) -> Range:
    return Range(part[1].start, part[1].num_items, part[1].width)


class _Source:
    """The parts of every tensor, and the requests for those of other ranks."""

    def __init__(
        self, own: Copied, copies: Sequence[Sequence[Place]], channel: PartChannel | None, bucket_bytes: int
    ) -> None:
        self._own, self._channel, self._bucket_bytes = own, channel, max(64, bucket_bytes)
        self._size = len(copies)
        self._buffer_U = self._rows_U = torch.empty(0, dtype=torch.uint8)
        parts: dict[str, list[tuple[int, Place]]] = {}
        for rank, places in enumerate(copies):
            for place in places:
                parts.setdefault(place.key, []).append((rank, place))
        self._bands = {key: arranged(found, _range, found[0][1].row_items) for key, found in parts.items()}
        self._far_bytes = sum(place.num_bytes for places in copies[1:] for place in places)
        incomplete = [
            key
            for key, found in self._bands.items()
            if not are_complete([[_range(part) for part in band] for band in found], found[0][0][1].shape)
        ]
        assert not incomplete, f"parts of {incomplete[:3]} are on no rank, or on several"
        self.layout = {
            key: TensorLayout(found[0][0][1].dtype, tuple(found[0][0][1].shape)) for key, found in self._bands.items()
        }

    @contextlib.contextmanager
    def chunks(self, keys: Sequence[str]) -> Iterator[Iterator[Chunk]]:
        """See GatheredTensors.chunks. What was requested and not read is received and dropped."""
        buckets = self._buckets(piece for key in keys for piece in self._pieces(key))
        for rank in range(1, self._size):
            messages = [spans for bucket in buckets if (spans := _spans(bucket, rank))]
            if messages:
                assert self._channel is not None
                self._channel.ask(rank, messages)
        reading = self._read(buckets)
        is_lost = False
        try:
            yield reading
        except RankLost:
            is_lost = True
            raise
        finally:
            if not is_lost:
                for _ in reading:
                    pass

    def _buckets(self, pieces: Iterator[_Piece]) -> list[list[_Piece]]:
        """Divide the pieces into runs, of which those of other ranks are together at most a bucket."""
        buckets: list[list[_Piece]] = [[]]
        num_bytes = 0
        for piece in pieces:
            size = sum(span.num_bytes for span in piece.spans if span.rank)
            if num_bytes + size > self._bucket_bytes:
                buckets.append([])
                num_bytes = 0
            buckets[-1].append(piece)
            num_bytes += size
        return buckets

    def _read(self, buckets: Sequence[Sequence[_Piece]]) -> Iterator[Chunk]:
        for bucket in buckets:
            starts = self._receive(bucket)
            for piece in bucket:
                found = [self._received(span, starts) for span in piece.spans]
                yield piece.key, memoryview((self._joined(found, piece.rows) if piece.rows else found[0]).numpy().data)

    def _received(self, span: _Span, starts: dict[int, int]) -> torch.Tensor:
        """Return the bytes of a span. starts: where the next one of each rank begins in the buffer."""
        source_U, start = self._own.buffer_U, span.offset
        if span.rank:
            source_U, start = self._buffer_U, starts[span.rank]
            starts[span.rank] += span.num_bytes
        return source_U[start : start + span.num_bytes]

    def _joined(self, columns: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        """Return the bytes of `rows` rows from those of their columns, valid until the next call."""
        num_bytes = sum(len(one) for one in columns)
        if len(self._rows_U) < num_bytes:
            self._rows_U = torch.empty(num_bytes, dtype=torch.uint8)
        joined_U = self._rows_U[:num_bytes]
        torch.cat([one.view(rows, -1) for one in columns], dim=1, out=joined_U.view(rows, -1))
        return joined_U

    def _receive(self, bucket: Sequence[_Piece]) -> dict[int, int]:
        """Receive the pieces of other ranks; returns where those of each rank begin in the buffer."""
        sizes = {rank: sum(num_bytes for _, num_bytes in _spans(bucket, rank)) for rank in range(1, self._size)}
        needed_bytes = sum(sizes.values())  # more than a bucket if a row of columns is
        if len(self._buffer_U) < needed_bytes:  # once: the reader still holds the last piece while others are received
            size = max(min(self._bucket_bytes, self._far_bytes), needed_bytes)
            self._buffer_U = torch.empty(size, dtype=torch.uint8)
        starts: dict[int, int] = {}
        start = 0
        for rank, size in sizes.items():
            starts[rank] = start
            if size:
                assert self._channel is not None
                self._channel.receive(rank, self._buffer_U[start : start + size])
            start += size
        return starts

    def _pieces(self, key: str) -> Iterator[_Piece]:
        for band in self._bands[key]:
            rank, place = band[0]
            if place.width:
                yield from self._pieces_of_rows(key, band)
                continue
            end = place.offset + place.num_bytes
            for offset in range(place.offset, end, self._bucket_bytes):
                yield _Piece(key, (_Span(rank, offset, min(self._bucket_bytes, end - offset)),))

    def _pieces_of_rows(self, key: str, band: _Band) -> Iterator[_Piece]:
        """Yield pieces of a quarter of a bucket, or of one row: they are joined in memory of their own."""
        first = band[0][1]
        num_rows, size = first.num_items // first.width, first.torch_dtype.itemsize
        step = max(1, self._bucket_bytes // JOINED_SHARE // (first.row_items * size))
        for row in range(0, num_rows, step):
            rows = min(step, num_rows - row)
            spans = [
                _Span(rank, place.offset + row * place.width * size, rows * place.width * size) for rank, place in band
            ]
            yield _Piece(key, tuple(spans), rows)
