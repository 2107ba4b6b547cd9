"""Claims about deltas: lossless whatever the bits, small where little changed, refused where damaged."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
import zstandard
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import WeightError
from areal_like.weights import delta
from areal_like.weights.delta import (
    Base,
    DeltaManifest,
    DeltaTensor,
    Offer,
    apply_tensor,
    digest,
    encode_tensor,
    route,
    same_layout,
)
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import describe

DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64}


def travel(base: np.ndarray, new: np.ndarray, dtype: str, level: int = 1) -> tuple[bytes, int]:
    blocks = b"".join(encode_tensor(base.data.cast("B"), new.data.cast("B"), dtype, level))
    target = bytearray(base.tobytes())
    if blocks:
        apply_tensor(memoryview(blocks), memoryview(target), dtype)
    return bytes(target), len(blocks)


@st.composite
def pairs(draw):
    """Two tensors of one dtype: unrelated bits, or a few, many or all items changed by a little or by anything."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    size = draw(st.integers(0, 300))
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = DTYPES[dtype]
    top = np.iinfo(kind).max
    base = dice.integers(0, top, size, dtype=kind, endpoint=True)
    new = base.copy()
    share = draw(st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]))
    where = dice.random(size) < share
    if draw(st.booleans()):
        new[where] += kind(draw(st.sampled_from([1, 3, top])))  # top is one step down
    else:
        new[where] = dice.integers(0, top, int(where.sum()), dtype=kind, endpoint=True)
    return dtype, base, new


@settings(max_examples=num_examples(100), deadline=None)
@given(pairs(), st.integers(1, 64))
def test_any_bits_come_back_whatever_the_block_size(pair, block_items):
    dtype, base, new = pair
    usual, delta.BLOCK_ITEMS = delta.BLOCK_ITEMS, block_items
    try:
        assert travel(base, new, dtype)[0] == new.tobytes()
    finally:
        delta.BLOCK_ITEMS = usual


def test_special_floats_come_back_bit_by_bit():
    """NaN payloads, infinities, signed zeros and subnormals are bits like any other."""
    base = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1.0], np.float32)
    new = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf, -1e-45, 1.0], np.float32)
    new.view(np.uint32)[2] = 0x7FC12345
    assert travel(base.view(np.uint32), new.view(np.uint32), "float32")[0] == new.tobytes()


def test_equal_tensors_take_no_bytes():
    same = np.arange(1000, dtype=np.uint16)
    assert travel(same, same.copy(), "bfloat16")[1] == 0


def test_one_percent_of_last_places_takes_little_more_than_a_byte_each():
    dice = np.random.default_rng(0)
    base = dice.normal(size=200_000).astype(np.float32).view(np.uint32) >> 16
    base = base.astype(np.uint16)
    new = base.copy()
    where = dice.choice(len(base), 2000, replace=False)
    new[where] += dice.choice(np.array([1, 2**16 - 1], np.uint16), 2000)
    data, num_bytes = travel(base, new, "bfloat16")
    assert data == new.tobytes()
    assert num_bytes < 2000 * 1.6
    assert num_bytes < base.nbytes / 100


def test_one_damaged_byte_never_passes_for_another_result():
    """Damage is refused here, or gives a wrong result that the checksum after applying finds; it never crashes."""
    dice = np.random.default_rng(1)
    base = dice.integers(0, 2**16, 500, dtype=np.uint16)
    new = base.copy()
    new[::7] += 1
    blocks = b"".join(encode_tensor(base.data.cast("B"), new.data.cast("B"), "bfloat16", 1))
    for position in range(len(blocks)):
        broken = bytearray(blocks)
        broken[position] ^= 0x41
        target = bytearray(base.tobytes())
        try:
            apply_tensor(memoryview(broken), memoryview(target), "bfloat16")
        except WeightError:
            continue
        assert isinstance(target, bytearray)


def test_a_cut_delta_and_one_of_another_size_are_refused():
    base, new = np.zeros(64, np.uint32), np.ones(64, np.uint32)
    blocks = b"".join(encode_tensor(base.data.cast("B"), new.data.cast("B"), "float32", 1))
    for broken in (blocks[:-1], blocks + blocks, blocks[:6]):
        with pytest.raises(WeightError):
            apply_tensor(memoryview(broken), memoryview(bytearray(base.tobytes())), "float32")
    with pytest.raises(WeightError):
        apply_tensor(memoryview(blocks), memoryview(bytearray(63 * 4)), "float32")


def block(how: int, width: int, num_items: int, num_changed: int, *planes: bytes) -> bytes:
    """One block as its format says: head, lengths of the planes, planes."""
    blobs = [zstandard.ZstdCompressor().compress(plane) for plane in planes]
    lengths = b"".join(struct.pack("<I", len(blob)) for blob in blobs)
    return struct.pack("<BBII", how, width, num_items, num_changed) + lengths + b"".join(blobs)


def applied(*blocks: bytes, num_items: int = 9) -> list[int]:
    target = bytearray(num_items)
    apply_tensor(memoryview(b"".join(blocks)), memoryview(target), "uint8")
    return list(target)


GAPS, BITMAP, ALL = delta._GAPS, delta._BITMAP, delta._ALL
STEP_UP = bytes([2])
"""A difference of one, folded."""


def test_places_are_gaps_or_a_bitmap_or_all_items_and_blocks_follow_one_another() -> None:
    gaps = [bytes([1, 2]), bytes(2), bytes(2), bytes(2)]
    assert applied(block(GAPS, 1, 9, 2, *gaps, STEP_UP * 2)) == [0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert applied(block(BITMAP, 1, 9, 2, bytes([0b01000000, 0b10000000]), STEP_UP * 2)) == [0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert applied(block(ALL, 1, 9, 9, STEP_UP * 9)) == [1] * 9
    assert applied(block(GAPS, 1, 4, 0), block(ALL, 1, 5, 5, STEP_UP * 5)) == [0] * 4 + [1] * 5


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([block(ALL, 2, 9, 9, STEP_UP * 9, STEP_UP * 9)], "does not fit its tensor"),
        ([block(ALL, 1, 10, 10, STEP_UP * 10)], "does not fit its tensor"),
        ([block(ALL, 1, 9, 9, STEP_UP * 9), block(GAPS, 1, 1, 0)], "does not fit its tensor"),
        ([block(GAPS, 1, 8, 9)], "does not fit its tensor"),
        ([block(GAPS, 1, 0, 0), block(ALL, 1, 9, 9, STEP_UP * 9)], "does not fit its tensor"),
        ([block(3, 1, 9, 0)], "unknown encoding"),
        ([block(ALL, 1, 9, 8, STEP_UP * 8)], "unknown encoding"),
        ([block(GAPS, 1, 8, 0)], "the delta has 8 items, but the tensor has 9"),
        ([block(GAPS, 1, 9, 1, bytes([9]), b"\0", b"\0", b"\0", STEP_UP)], "invalid positions"),
        ([block(BITMAP, 1, 9, 1, bytes([0b11000000, 0]), STEP_UP)], "invalid positions"),
        ([block(BITMAP, 1, 9, 2, bytes([0b10000000, 0]), STEP_UP * 2)], "invalid positions"),
        ([block(BITMAP, 1, 9, 1, bytes([0b10000000]), STEP_UP)], "the wrong size"),
        ([block(ALL, 1, 9, 9, STEP_UP * 8)], "the wrong size"),
    ],
)
def test_blocks_that_do_not_fit_their_tensor_are_refused(blocks: list[bytes], words: str) -> None:
    with pytest.raises(WeightError, match=words):
        applied(*blocks)


def test_the_last_item_of_a_block_may_change() -> None:
    assert applied(block(GAPS, 1, 9, 1, bytes([8]), b"\0", b"\0", b"\0", STEP_UP))[8] == 1


def test_a_plane_that_claims_a_giant_size_is_refused_before_memory_is_taken():
    base, new = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    blocks = b"".join(encode_tensor(base.data.cast("B"), new.data.cast("B"), "uint8", 1))
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    head = delta._HEAD.size + delta._LENGTH.size
    broken = blocks[: delta._HEAD.size] + delta._LENGTH.pack(len(bomb)) + bomb
    assert head < len(blocks)
    with pytest.raises(WeightError, match="the wrong size"):
        apply_tensor(memoryview(broken), memoryview(bytearray(64)), "uint8")


# ------------------------------------------------------------ which way


def test_the_way_with_fewest_bytes_is_taken():
    base = Base(3, "d3")
    offers = {0: Offer(100), **{v: Offer(10, v - 1, f"d{v - 1}") for v in range(1, 6)}}
    assert route(offers, 5, base) == [4, 5]
    assert route(offers, 5, None) == [0, 1, 2, 3, 4, 5]
    assert route(offers, 5, Base(3, "other")) == [0, 1, 2, 3, 4, 5]
    assert route({**offers, 4: Offer(5)}, 5, base) == [4, 5]
    assert route({**offers, 5: Offer(1000)}, 5, base) == [5]


def test_a_dear_chain_gives_way_to_a_full_version():
    offers = {0: Offer(100), 1: Offer(90, 0, "d0"), 2: Offer(30), 3: Offer(10, 2, "d2")}
    assert route(offers, 3, Base(0, "d0")) == [2, 3]


def test_without_a_full_version_and_base_there_is_no_way():
    with pytest.raises(WeightError, match="cannot be loaded"):
        route({5: Offer(10, 4, "d4")}, 5, Base(3, "d3"))
    with pytest.raises(WeightError):
        route({}, 5, None)


# ------------------------------------------------------------ manifests


def tensors(value: float, shape: tuple[int, ...] = (4, 3)) -> dict[str, TensorBytes]:
    return {"a": TensorBytes("float32", shape, np.full(shape, value, np.float32).data)}


def test_digest_names_the_content_and_not_the_place():
    one = describe("disk", 1, "l0", tensors(1.0))
    assert digest(one) == digest(describe("shm", 7, "l1", tensors(1.0)))
    assert digest(one) != digest(describe("disk", 1, "l0", tensors(2.0)))
    assert digest(one) != digest(describe("disk", 1, "l0", tensors(1.0, (3, 4))))


def test_only_equal_layouts_have_deltas():
    one = describe("disk", 1, "l0", tensors(1.0))
    assert same_layout(one, describe("disk", 2, "l0", tensors(2.0)))
    assert not same_layout(one, describe("disk", 2, "l0", tensors(2.0, (3, 4))))
    assert not same_layout(one, describe("shm", 2, "l0", tensors(2.0)))
    assert not same_layout(one, msgspec.structs.replace(one, kind="shm")), "of the kind alone"
    assert not same_layout(one, msgspec.structs.replace(one, tensors=(*one.tensors, *one.tensors))), "more tensors"
    assert not same_layout(one, msgspec.structs.replace(one, num_bytes=one.num_bytes + 1))


@pytest.mark.parametrize(
    "change",
    [
        {"payload": "../elsewhere"},
        {"base_version": 2},
        {"tensors": (DeltaTensor(name="a", offset=5, num_bytes=10),)},
        {"tensors": (DeltaTensor(name="b", offset=0, num_bytes=1),)},
        {"tensors": ()},
    ],
)
def test_impossible_delta_manifests_are_refused(change):
    good = {
        "base_version": 1, "base_digest": "d", "payload": "v2.delta", "num_bytes": 12,
        "tensors": (DeltaTensor(name="a", offset=0, num_bytes=12),), "result": describe("disk", 2, "l0", tensors(1.0)),
    }  # fmt: skip
    DeltaManifest(**good)
    with pytest.raises(ValueError):
        DeltaManifest(**{**good, **change})
