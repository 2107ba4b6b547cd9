"""Claims about reading the copies of several ranks: the same bytes, in bounded pieces, and always in step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from part_channels import LocalChannel

from trainer.gathered import GatheredTensors, gathered
from trainer.host_copy import Copied, HostCopy, Part
from trainer.peer_errors import RankLost


def rows_on_ranks(tensors: dict[str, torch.Tensor], num_ranks: int) -> list[Copied]:
    """A copy for each rank: equal chunks of rows, as FSDP2 cuts them; the last ranks may have none."""
    copies = []
    for rank in range(num_ranks):
        parts = []
        for key, tensor in tensors.items():
            size = -(-len(tensor) // num_ranks) * tensor[:1].numel()
            start = min(rank * size, tensor.numel())
            parts.append(Part(key, tuple(tensor.shape), start, tensor.reshape(-1)[start : start + size]))
        copies.append(HostCopy().take(parts))
    return copies


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"weight/a": torch.randn(7, 33), "weight/b": torch.randn(2), "exp_avg/a": torch.randn(7, 33)}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bytes_are_the_tensors_and_no_piece_is_larger_than_a_bucket(tensors: Any, num_ranks: int) -> None:
    own, *others = rows_on_ranks(tensors, num_ranks)
    channel: Any = LocalChannel(*others)
    with gathered(own, channel, 128) as found:
        assert found.keys() == tensors.keys()
        order = sorted(tensors)
        with found.chunks(order) as chunks:
            pieces = [(key, bytes(data)) for key, data in chunks]
        for key in order:
            assert b"".join(data for name, data in pieces if name == key) == tensors[key].numpy().tobytes()
        assert [key for key, _ in itertools.groupby(name for name, _ in pieces)] == order
        assert max(len(data) for _, data in pieces) == 128
        assert max(channel.pieces, default=0) <= 128, "several pieces in a message are together no larger"
        assert all(torch.equal(found[key], tensors[key]) for key in tensors), "a second time"
    assert channel.ended == set(range(1, num_ranks))


def columns_on_ranks(tensors: dict[str, torch.Tensor], num_rows: int, num_columns: int) -> list[Copied]:
    """A copy for each rank: chunks of rows, and of each equal columns, as FSDP2 and tensor parallelism cut them;
    vectors are on the first ranks only."""
    copies = []
    for rank in range(num_rows * num_columns):
        row, column = divmod(rank, num_columns)
        parts = []
        for key, tensor in tensors.items():
            size = -(-len(tensor) // num_rows)
            first = min(row * size, len(tensor))
            rows = tensor[first : first + size]
            if tensor.ndim == 1:
                if column == 0:
                    parts.append(Part(key, tuple(tensor.shape), first, rows))
                continue
            width = tensor.shape[1] // num_columns
            own = rows[:, column * width : (column + 1) * width].contiguous()
            parts.append(Part(key, tuple(tensor.shape), first * tensor.shape[1] + column * width, own, width))
        copies.append(HostCopy().take(parts))
    return copies


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 3), (2, 3), (4, 3)])
@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
def test_columns_of_several_ranks_are_rows_again(
    tensors: Any, num_rows: int, num_columns: int, bucket_bytes: int
) -> None:
    own, *others = columns_on_ranks(tensors, num_rows, num_columns)
    channel: Any = LocalChannel(*others)
    with gathered(own, channel, bucket_bytes) as found, found.chunks(sorted(tensors)) as chunks:
        pieces = [(key, bytes(data)) for key, data in chunks]
    for key, tensor in tensors.items():
        assert b"".join(data for name, data in pieces if name == key) == tensor.numpy().tobytes()
    row_bytes = 33 * 4
    assert max(len(data) for _, data in pieces) <= max(bucket_bytes // 4, row_bytes)
    assert max(channel.pieces) <= max(bucket_bytes, row_bytes)
    assert channel.ended == set(range(1, num_rows * num_columns))


def test_columns_that_are_missing_or_doubled_are_noticed(tensors: Any) -> None:
    copies = columns_on_ranks(tensors, 2, 3)
    for others in (copies[1:-1], [*copies[1:], copies[-1]]):
        channel: Any = LocalChannel(*others)
        with pytest.raises(AssertionError, match="are on no rank, or on several"), gathered(copies[0], channel, 64):
            pass


def test_selected_tensors_have_other_names_and_nothing_else_is_asked_for(tensors: Any) -> None:
    own, other = rows_on_ranks(tensors, 2)
    channel: Any = LocalChannel(other)
    with gathered(own, channel, 1 << 20) as found:
        weights = found.select(lambda key: key.removeprefix("weight/") if key.startswith("weight/") else None)
        assert set(weights) == {"a", "b"}
        assert weights.layout["a"].shape == (7, 33)
        assert torch.equal(weights["a"], tensors["weight/a"])
    assert sum(channel.pieces) == 3 * 33 * 4, "the other rank's rows of one tensor"


def write_one(found: GatheredTensors, keys: list[str]) -> None:
    """Fail after the first piece."""
    with found.chunks(keys) as chunks:
        next(chunks)
        raise OSError("disk full")


def test_what_a_writer_that_fails_has_asked_for_is_received_so_that_ranks_stay_in_step(tensors: Any) -> None:
    own, other = rows_on_ranks(tensors, 2)
    channel: Any = LocalChannel(other)
    with gathered(own, channel, 64) as found:
        with pytest.raises(OSError, match="disk full"):
            write_one(found, list(tensors))
        assert channel.pending == {1: []}
        assert torch.equal(found["weight/a"], tensors["weight/a"]), "another attempt"
    assert channel.pending == {1: []}
    assert channel.ended == {1}


def test_a_lost_rank_is_not_asked_again(tensors: Any) -> None:
    own, other = rows_on_ranks(tensors, 2)
    channel: Any = LocalChannel(other)

    def lost(rank: int, out_U: torch.Tensor) -> None:
        raise RankLost(f"rank {rank} is gone")

    channel.receive = lost
    with pytest.raises(RankLost), gathered(own, channel, 64) as found:
        dict(found)
    assert not channel.ended
