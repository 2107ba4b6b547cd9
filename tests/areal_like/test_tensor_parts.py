"""Claims about tensors in the parts of ranks: any range is read from any division, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.errors import WeightError
from areal_like.weights import tensor_parts
from areal_like.weights.payload_layout import TensorLayout, lay_out
from areal_like.weights.tensor_parts import (
    PLACES,
    PartPlace,
    Piece,
    Range,
    SpreadTensor,
    are_complete,
    arranged,
    blocks,
    has_parts,
    part_files,
    part_name,
    tensors_in,
)

ROWS, COLUMNS = 7, 6
FULL_RC = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


def items_of(one: Range) -> np.ndarray:
    """The items of a range, flat, by NumPy's own indexing."""
    if not one.width:
        return FULL_RC.reshape(-1)[one.start : one.start + one.num]
    row, column = divmod(one.start, COLUMNS)
    return FULL_RC[row : row + one.num // one.width, column : column + one.width].reshape(-1)


def write_part(folder: Path, rank: int, size: int, parts: dict[str, tuple[PartPlace, np.ndarray]]) -> Path:
    layout = {key: TensorLayout("float32", (items.size,)) for key, (_, items) in parts.items()}
    places = {key: place for key, (place, _) in parts.items()}
    entries, header = lay_out("disk", layout, {PLACES: msgspec.json.encode(places).decode()})
    file = folder / part_name(rank, size)
    file.write_bytes(header + b"".join(parts[entry.name][1].astype("<f4").tobytes() for entry in entries))
    return file


def write_ranges(folder: Path, ranges: Sequence[Range]) -> list[Path]:
    return [
        write_part(folder, rank, len(ranges), {"w": (PartPlace((ROWS, COLUMNS), one.start, one.width), items_of(one))})
        for rank, one in enumerate(ranges)
    ]


ROWS_OF_THREE = [Range(0, 18, 0), Range(18, 18, 0), Range(36, 6, 0)]
COLUMNS_OF_TWO = [Range(0, 21, 3), Range(3, 21, 3)]
BOTH = [Range(0, 8, 2), Range(2, 16, 4), Range(24, 6, 2), Range(26, 12, 4)]
"""Two bands of rows with columns on two ranks each, as of FSDP2 with tensor parallelism."""
UNALIGNED = [Range(0, 4, 0), Range(4, 15, 0), Range(19, 1, 0), Range(20, 22, 0)]
"""As of ZeRO."""
DIVISIONS = {"rows": ROWS_OF_THREE, "columns": COLUMNS_OF_TWO, "both": BOTH, "unaligned": UNALIGNED}


def test_divisions_of_this_file_are_complete_and_arranged() -> None:
    for ranges in DIVISIONS.values():
        bands = arranged(ranges[::-1], lambda one: one, COLUMNS)
        assert are_complete(bands, FULL_RC.shape)
        assert not are_complete(bands[:-1], FULL_RC.shape)
    assert [len(band) for band in arranged(BOTH, lambda one: one, COLUMNS)] == [2, 2]


@pytest.mark.parametrize("stored", DIVISIONS)
@pytest.mark.parametrize("wanted", DIVISIONS)
def test_any_division_is_read_from_any_other(
    stored: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parts, "READ_BYTES", 2 * COLUMNS * 4)
    write_ranges(tmp_path, DIVISIONS[stored])
    tensor = tensors_in(tmp_path)["w"]
    assert (tensor.dtype, tensor.shape, tensor.num_bytes) == ("F32", (ROWS, COLUMNS), FULL_RC.nbytes)
    for one in DIVISIONS[wanted]:
        out_U = np.zeros(one.num * 4, np.uint8)
        tensor.read(one.start, one.num, out_U, one.width)
        assert out_U.view(np.float32).tolist() == items_of(one).tolist()
    assert tensor.bytes_of().view(np.float32).tolist() == FULL_RC.reshape(-1).tolist()


@given(st.integers(0, ROWS * COLUMNS - 1), st.integers(0, ROWS * COLUMNS))
def test_blocks_of_consecutive_items_are_these_items_in_order(start: int, num: int) -> None:
    num = min(num, ROWS * COLUMNS - start)
    found = list(blocks(start, num, 0, COLUMNS))
    assert len(found) <= 3
    items: list[float] = []
    for one in found:
        assert one.first == len(items)
        items += FULL_RC[one.row : one.row + one.rows, one.column : one.column + one.columns].reshape(-1).tolist()
    assert items == FULL_RC.reshape(-1)[start : start + num].tolist()


def test_only_the_bytes_of_the_range_are_read(tmp_path: Path) -> None:
    """The other ranks' files are not even there."""
    files = write_ranges(tmp_path, ROWS_OF_THREE)
    tensor = tensors_in(tmp_path)["w"]
    files[0].unlink()
    files[2].unlink()
    out_U = np.zeros(12 * 4, np.uint8)
    tensor.read(20, 12, out_U)
    assert out_U.view(np.float32).tolist() == list(range(20, 32))
    files[1].write_bytes(files[1].read_bytes()[:-16])
    tensor.read(20, 12, out_U)
    with pytest.raises(WeightError, match="is truncated"):
        tensor.read(20, 14, np.zeros(14 * 4, np.uint8))


def test_scalars_vectors_and_empty_tensors_are_read(tmp_path: Path) -> None:
    write_part(tmp_path, 0, 2, {
        "step": (PartPlace((), 0), np.float32([3.0])), "bias": (PartPlace((5,), 0), np.float32([0, 1, 2])),
        "none": (PartPlace((0, 4), 0), np.float32([])),
    })  # fmt: skip
    write_part(tmp_path, 1, 2, {"bias": (PartPlace((5,), 3), np.float32([3, 4]))})
    found = {key: tensor.bytes_of().view(np.float32).tolist() for key, tensor in tensors_in(tmp_path).items()}
    assert found == {"step": [3.0], "bias": [0, 1, 2, 3, 4], "none": []}
    assert tensors_in(tmp_path)["bias"].bytes_of(2, 2).view(np.float32).tolist() == [2, 3]


def test_folder_has_parts_by_their_names_only(tmp_path: Path) -> None:
    (tmp_path / "part-one.safetensors").touch()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert not has_parts(tmp_path)
    with pytest.raises(WeightError, match="contains no parts"):
        part_files(tmp_path)
    write_ranges(tmp_path, ROWS_OF_THREE)
    assert has_parts(tmp_path)
    assert [file.name for file in part_files(tmp_path)] == [part_name(rank, 3) for rank in range(3)]


def test_missing_part_and_two_sets_of_parts_are_named(tmp_path: Path) -> None:
    files = write_ranges(tmp_path, ROWS_OF_THREE)
    files[1].unlink()
    with pytest.raises(WeightError, match=r"part-00001-of-00003.safetensors is missing, one of the 3 parts"):
        tensors_in(tmp_path)
    write_ranges(tmp_path, COLUMNS_OF_TWO)
    with pytest.raises(WeightError, match="contains parts of 2 and of 3 ranks"):
        tensors_in(tmp_path)


@pytest.mark.parametrize(
    "ranges", [[Range(0, 18, 0), Range(20, 22, 0)], [Range(0, 20, 0), Range(18, 24, 0)], [Range(0, 21, 3)]]
)
def test_gap_an_overlap_and_missing_columns_are_found(ranges: list[Range], tmp_path: Path) -> None:
    write_ranges(tmp_path, ranges)
    with pytest.raises(WeightError, match="do not have every item of the tensor w exactly once"):
        tensors_in(tmp_path)


def test_another_shape_in_one_part_is_found(tmp_path: Path) -> None:
    write_part(tmp_path, 0, 2, {"w": (PartPlace((4,), 0), np.zeros(2))})
    write_part(tmp_path, 1, 2, {"w": (PartPlace((5,), 2), np.zeros(2))})
    with pytest.raises(WeightError, match="has the tensor w in another dtype or shape"):
        tensors_in(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("__metadata__"),
        lambda header: header["__metadata__"].update({PLACES: "nothing"}),
        lambda header: header["__metadata__"].update({PLACES: "{}"}),
        lambda header: header["__metadata__"].update({PLACES: '{"w": [[7, 6], -1]}'}),
        lambda header: header["w"].update(shape=[3, 6]),
        lambda header: header["w"].update(shape=[17]),
        None,
    ],
)
def test_damaged_part_is_one_sentence(change: Any, tmp_path: Path) -> None:
    file = write_ranges(tmp_path, ROWS_OF_THREE)[0]
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if change is None:
        file.write_bytes(data[: size // 2])
    else:
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(WeightError, match=r"part-00000-of-00003.safetensors is not a complete part of a checkpoint"):
        tensors_in(tmp_path)


def test_pieces_name_their_bytes(tmp_path: Path) -> None:
    file = write_ranges(tmp_path, [Range(0, 42, 0)])[0]
    (piece,) = tensors_in(tmp_path)["w"].pieces
    assert piece == Piece(file, file.stat().st_size - FULL_RC.nbytes, Range(0, 42, 0))
    assert SpreadTensor("F32", (2, 3), 4, ()).num_bytes == 24
