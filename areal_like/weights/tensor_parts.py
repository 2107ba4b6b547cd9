"""Tensors whose items are spread over safetensors files, one file per rank of a trainer. Does not import torch.

A folder of N parts has the files part-00000-of-0000N.safetensors and so on. A file has flat ranges of items by the key
of their tensor; its `__metadata__` has the place of each in the full tensor. A range is contiguous in the flattened
full tensor, or it has the same columns of consecutive rows. Any range of a tensor can be read, whatever those in the
files are. Files are written in trainer/rank_parts.py.

A tensor is regarded as a matrix: a row is what the first dimension counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from areal_like.errors import UserError, WeightError
from areal_like.weights.safetensors_header import read_header

PLACES = "areal_like.places"
"""Key of the header's metadata: PartPlace by tensor, as JSON."""
READ_BYTES = 4 << 20
"""Bytes that are read at once where only columns of them are wanted, or are not adjacent in the result."""
_NAME = re.compile(r"part-(\d{5})-of-(\d{5})\.safetensors")
_HEAD_BYTES = 8
T = TypeVar("T")


class PartPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a range of items in its full tensor.

    shape: of the full tensor. start: index of the first item in the flattened full tensor. width: columns of each row,
    if the range has only columns of several rows; 0: the items are consecutive.
    """

    shape: tuple[int, ...]
    start: int
    width: int = 0


def part_name(rank: int, size: int) -> str:
    """Return the name of a rank's file. size: number of ranks."""
    return f"part-{rank:05d}-of-{size:05d}.safetensors"


def has_parts(folder: Path) -> bool:
    """Return whether the folder has a file of `part_name`."""
    return any(_NAME.fullmatch(file.name) for file in folder.glob("part-*.safetensors"))


def part_files(folder: Path) -> list[Path]:
    """Return the files of all parts. Raises WeightError if there are none, one is missing, or there are two sets."""
    found = {file.name: match for file in folder.glob("part-*.safetensors") if (match := _NAME.fullmatch(file.name))}
    sizes = sorted({int(match[2]) for match in found.values()})
    if len(sizes) != 1:
        what = f"parts of {' and of '.join(map(str, sizes))} ranks" if sizes else "no parts"
        raise WeightError(f"{folder} contains {what}, not the parts of one checkpoint")
    names = [part_name(rank, sizes[0]) for rank in range(sizes[0])]
    if missing := [name for name in names if name not in found]:
        raise WeightError(f"{folder / missing[0]} is missing, one of the {sizes[0]} parts of the checkpoint")
    return [folder / name for name in names]


# ---------------------------------------------------------------- ranges


class Block(NamedTuple):
    """A rectangle of a tensor's items, row by row. first: index of its first item in what contains it."""

    row: int
    rows: int
    column: int
    columns: int
    first: int


def blocks(start: int, num: int, width: int, row_items: int) -> Iterator[Block]:
    """Divide a range of items into rectangles: one of columns, or up to three of consecutive items."""
    if not num:
        return
    row, column = divmod(start, row_items)
    if width:
        yield Block(row, num // width, column, width, 0)
        return
    first = 0
    if column:
        first = min(num, row_items - column)
        yield Block(row, 1, column, first, 0)
        row += 1
    if rows := (num - first) // row_items:
        yield Block(row, rows, 0, row_items, first)
        row, first = row + rows, first + rows * row_items
    if first < num:
        yield Block(row, 1, 0, num - first, first)


class Range(NamedTuple):
    """A range of items, without its tensor: index of the first item, number of items, and columns (see PartPlace)."""

    start: int
    num: int
    width: int


def arranged(parts: Sequence[T], range_of: Callable[[T], Range], row_items: int) -> list[list[T]]:
    """Arrange the parts of a tensor in the order of their items; those with columns of the same rows are together."""
    bands: list[list[T]] = []
    for part in sorted(parts, key=lambda one: range_of(one).start):
        own = range_of(part)
        if own.width and bands and _rows(range_of(bands[-1][0]), row_items) == _rows(own, row_items):
            bands[-1].append(part)
        else:
            bands.append([part])
    return bands


def are_complete(bands: Sequence[Sequence[Range]], shape: Sequence[int]) -> bool:
    """Return whether arranged parts have each item of the tensor exactly once."""
    end, row_items = 0, math.prod(shape[1:])
    for band in bands:
        column = 0
        for one in band:
            if one.start != end + column:
                return False
            column += one.width
        if band[0].width and column != row_items:
            return False
        end += sum(one.num for one in band)
    return end == math.prod(shape)


def _rows(one: Range, row_items: int) -> tuple[int, int] | None:
    """First row and number of rows of a range of columns."""
    return (one.start // row_items, one.num // one.width) if one.width else None


# ---------------------------------------------------------------- tensors


class Piece(NamedTuple):
    """A range of items in a file. offset: of its first byte, from the beginning of the file."""

    file: Path
    offset: int
    range: Range


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor whose items are in one or more files. dtype: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.item_bytes

    def read(self, first: int, num: int, out_U: np.ndarray, width: int = 0) -> None:
        """Read a range of items into `out_U`, bytes in C order.

        Consecutive items are read as they are stored. Where a file has wider rows than are wanted, whole rows of it are
        read. Raises WeightError if a file is shorter than its header says.
        """
        assert len(out_U) == num * self.item_bytes
        row_items = math.prod(self.shape[1:])
        wanted = list(blocks(first, num, width, row_items))
        for piece in self.pieces:
            stored = list(blocks(*piece.range, row_items))
            shared = [(one, other) for one in stored for other in wanted if _overlap(one, other) is not None]
            if shared:
                with piece.file.open("rb", buffering=0) as opened:
                    for one, other in shared:
                        self._read_block(opened, piece, one, other, out_U)

    def bytes_of(self, first: int = 0, num: int | None = None) -> np.ndarray:
        """Return the bytes of consecutive items; num: how many; None: all from `first` on. Raises WeightError."""
        num = math.prod(self.shape) - first if num is None else num
        out_U = np.empty(num * self.item_bytes, np.uint8)
        self.read(first, num, out_U)
        return out_U

    def _read_block(self, opened: FileIO, piece: Piece, stored: Block, wanted: Block, out_U: np.ndarray) -> None:
        shared = _overlap(stored, wanted)
        assert shared is not None
        row, rows, column, columns, _ = shared
        size = self.item_bytes
        source = stored.first + (row - stored.row) * stored.columns + column - stored.column
        target = wanted.first + (row - wanted.row) * wanted.columns + column - wanted.column
        if rows == 1 or columns == stored.columns == wanted.columns:
            opened.seek(piece.offset + source * size)
            fill(opened, out_U.data[target * size : (target + rows * columns) * size], piece.file)
            return
        start, end = wanted.first * size, (wanted.first + wanted.rows * wanted.columns) * size
        out_RU = out_U[start:end].reshape(wanted.rows, -1)[row - wanted.row :]
        there, here = (column - stored.column) * size, (column - wanted.column) * size
        opened.seek(piece.offset + (stored.first + (row - stored.row) * stored.columns) * size)
        step = max(1, READ_BYTES // (stored.columns * size))
        for begin in range(0, rows, step):
            read_RU = np.empty((min(step, rows - begin), stored.columns * size), np.uint8)
            fill(opened, read_RU.reshape(-1).data, piece.file)
            out_RU[begin : begin + len(read_RU), here : here + columns * size] = read_RU[
                :, there : there + columns * size
            ]


def tensors_in(folder: Path) -> dict[str, SpreadTensor]:
    """Return every tensor of a folder of parts, by its key. Raises WeightError if a file is missing or damaged, or the
    parts do not have each item of a tensor exactly once."""
    pieces: dict[str, list[Piece]] = {}
    facts: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for file in part_files(folder):
        for key, dtype, place, piece, item_bytes in _entries(file):
            if facts.setdefault(key, (dtype, place.shape, item_bytes)) != (dtype, place.shape, item_bytes):
                raise WeightError(f"{file} has the tensor {key} in another dtype or shape than the other parts")
            pieces.setdefault(key, []).append(piece)
    found = {}
    for key, (dtype, shape, item_bytes) in facts.items():
        bands = arranged(pieces[key], lambda piece: piece.range, math.prod(shape[1:]))
        if not are_complete([[piece.range for piece in band] for band in bands], shape):
            raise WeightError(f"the parts in {folder} do not have every item of the tensor {key} exactly once")
        found[key] = SpreadTensor(dtype, shape, item_bytes, tuple(piece for band in bands for piece in band))
    return found


def _entries(file: Path) -> Iterator[tuple[str, str, PartPlace, Piece, int]]:
    try:
        header = read_header(file)
        places = msgspec.json.decode(header.pop("__metadata__")[PLACES], type=dict[str, PartPlace])
        with file.open("rb") as opened:
            start = _HEAD_BYTES + int.from_bytes(opened.read(_HEAD_BYTES), "little")
        for key, entry in header.items():
            place, (begin, end) = places[key], entry["data_offsets"]
            (num,) = entry["shape"]
            if num < 0 or begin > end or (num and (end - begin) % num):
                raise ValueError(f"the size of {key} does not match its number of items")
            if place.width < 0 or place.start < 0 or (place.width and num % place.width):
                raise ValueError(f"the place of {key} is not valid")
            item_bytes = (end - begin) // num if num else 1
            yield (
                key,
                entry["dtype"],
                place,
                Piece(file, start + begin, Range(place.start, num, place.width)),
                item_bytes,
            )
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError
    ) as error:  # fmt: skip
        reason = error.what if isinstance(error, UserError) else str(error)
        raise WeightError(f"{file} is not a complete part of a checkpoint ({reason})") from error


def _overlap(one: Block, other: Block) -> Block | None:
    row, end = max(one.row, other.row), min(one.row + one.rows, other.row + other.rows)
    column, last = max(one.column, other.column), min(one.column + one.columns, other.column + other.columns)
    return Block(row, end - row, column, last - column, 0) if row < end and column < last else None


def fill(opened: FileIO, view: memoryview, path: Path) -> None:
    """Read until `view` is full. Raises WeightError if the file ends before. path: of the file, for the message."""
    while len(view):
        num_bytes = opened.readinto(view)
        if not num_bytes:
            raise WeightError(f"{path} is truncated")
        view = view[num_bytes:]
