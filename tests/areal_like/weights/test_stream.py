"""The arithmetic of payloads in chunks, and how the place of a version is written and read."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.errors import WeightError
from areal_like.weights.stream import Locator, ParentRequest, Payload, WayRequest


def payload(num_bytes: int, chunk_bytes: int, num_crcs: int | None = None, **fields: Any) -> Payload:
    count = -(-num_bytes // max(chunk_bytes, 1)) if num_crcs is None else num_crcs
    fields = {"name": "v1", "chunk_crcs": np.zeros(count, np.uint32), **fields}
    return Payload(is_delta=False, num_bytes=num_bytes, chunk_bytes=chunk_bytes, manifest=b"", **fields)


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes", "sizes"),
    [(1, 1, [1]), (1, 9, [1]), (8, 4, [4, 4]), (9, 4, [4, 4, 1]), (7, 4, [4, 3]), (3, 1, [1, 1, 1])],
)
def test_chunks_cover_a_payload_and_only_the_last_one_is_shorter(
    num_bytes: int, chunk_bytes: int, sizes: list[int]
) -> None:
    made = payload(num_bytes, chunk_bytes)
    spans = [made.span(index) for index in range(made.num_chunks)]
    assert [span.stop - span.start for span in spans] == sizes
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == num_bytes
    for index in (-1, made.num_chunks):
        with pytest.raises(WeightError, match=f"no chunk {index}"):
            made.span(index)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_bytes": 0}, {"num_bytes": -1}, {"chunk_bytes": 0}, {"num_crcs": 1}, {"num_crcs": 3}, {"name": ""},
        {"name": "a/b"}, {"name": "a" * 129}, {"chunk_crcs": np.zeros(2, np.int32)},
        {"chunk_crcs": np.zeros((2, 1), np.uint32)},
    ],
)  # fmt: skip
def test_a_payload_that_contradicts_itself_cannot_be_made(fields: dict[str, Any]) -> None:
    payload(8, 4, name="a" * 128)
    with pytest.raises(ValueError, match="payload"):
        payload(**{"num_bytes": 8, "chunk_bytes": 4, "num_crcs": 2, **fields})


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("version", "text"), [(7, "v00000007"), (123456789, "v123456789")])
def test_a_place_is_read_as_it_was_written(by_group: bool, version: int, text: str) -> None:
    place = Locator("tcp://[::1]:4000", version, "l0.a-b", by_group=by_group)
    assert str(place) == f"{'group+' if by_group else ''}tcp://[::1]:4000/{text}-l0.a-b"
    assert Locator.parse(str(place)) == place
    assert not Locator("tcp://h:1", 1, "l0").by_group


@pytest.mark.parametrize(
    "text",
    ["/a/v00000001-l0", "tcp://h:1/v0000001-l0", "tcp://h:1/v00000001-", "tcp://h:1/v00000001-" + "a" * 65,
     "tcp://h:1/v00000001-a/b", " tcp://h:1/v00000001-l0"],
)  # fmt: skip
def test_other_text_is_no_place(text: str) -> None:
    assert Locator.parse("tcp://h:1/v00000001-" + "a" * 64) is not None
    assert Locator.parse(text) is None


def test_a_request_that_names_no_base_and_no_lost_parent_says_so_on_the_wire() -> None:
    assert WayRequest(version=3, lineage="l0") == WayRequest(version=3, lineage="l0", base_version=-1, base_digest="")
    assert msgspec.to_builtins(ParentRequest(payload="p", address="a"))["lost"] == ""
