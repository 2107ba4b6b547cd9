"""How a payload is cut into the buckets that travel through a process group."""

from __future__ import annotations

import pytest

from areal_like.weights.payload_layout import TensorEntry
from areal_like.weights.process_group import JoinRequest, buckets, store_prefixes
from areal_like.weights.weight_store import WeightManifest


def manifest(*sizes: int) -> WeightManifest:
    entries = []
    offset = 100
    for number, size in enumerate(sizes):
        entries.append(
            TensorEntry(name=f"t{number}", dtype="uint8", shape=(size,), offset=offset, num_bytes=size, crc32=0)
        )
        offset += size
    return WeightManifest(version=1, lineage="l0", kind="disk", payload="p", num_bytes=offset, tensors=tuple(entries))


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "names"),
    [
        ((), 4, []),
        ((0, 0), 4, []),
        ((2, 2), 4, [["t0", "t1"]]),
        ((2, 3), 4, [["t0"], ["t1"]]),
        ((2, 2, 1), 4, [["t0", "t1"], ["t2"]]),
        ((9, 1), 4, [["t0"], ["t1"]]),
        ((1, 9, 1), 4, [["t0"], ["t1"], ["t2"]]),
        ((1, 0, 3, 0), 4, [["t0", "t2"]]),
        ((1, 1), 1, [["t0"], ["t1"]]),
        ((3, 1, 3, 1, 2), 4, [["t0", "t1"], ["t2", "t3"], ["t4"]]),
    ],
)
def test_buckets_hold_whole_tensors_in_order_and_no_more_than_they_may(
    sizes: tuple[int, ...], bucket_bytes: int, names: list[list[str]]
) -> None:
    made = list(buckets(manifest(*sizes), bucket_bytes))
    assert [[entry.name for entry in bucket.entries] for bucket in made] == names
    assert [bucket.num_bytes for bucket in made] == [sum(entry.num_bytes for entry in one.entries) for one in made]
    assert [bucket.offset for bucket in made] == [bucket.entries[0].offset for bucket in made]
    assert sum(bucket.num_bytes for bucket in made) == sum(sizes)


def test_a_worker_takes_one_place_unless_it_says_otherwise() -> None:
    assert JoinRequest(version=1, lineage="l0").num_ranks == 1


def test_keys_of_a_group_begin_as_torch_and_sglang_begin_them() -> None:
    assert store_prefixes("g") == ("g", "g/")
