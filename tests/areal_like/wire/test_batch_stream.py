"""Claims about batches in a byte stream."""

from __future__ import annotations

import io

import numpy as np
import pytest

from areal_like.errors import WireError
from areal_like.trajectory import Segment, Trajectory
from areal_like.wire.batch_stream import read_batch, write_batch
from areal_like.wire.messages import Batch, BatchSample


def batch_of(step: int, length: int) -> Batch:
    answer = Segment(
        np.arange(length, dtype=np.int32), np.full(length, -0.1, np.float32), np.full(length, step, np.int32)
    )
    trajectory = Trajectory.from_prompt(np.array([7, 8], np.int32), answer, "length")
    return Batch(
        step=step, lineage="l1", samples=(BatchSample(group_id=4, sample_index=1, trajectory=trajectory, reward=0.5),)
    )


def test_batches_come_back_in_order_small_and_large() -> None:
    stream = io.BytesIO()
    for step, length in ((1, 3), (2, 100_000), (3, 1)):
        write_batch(stream, batch_of(step, length))
    stream.seek(0)
    for step, length in ((1, 3), (2, 100_000), (3, 1)):
        found = read_batch(stream)
        assert (found.step, found.lineage) == (step, "l1")
        (sample,) = found.samples
        assert (sample.group_id, sample.sample_index, sample.reward) == (4, 1, 0.5)
        expected = batch_of(step, length).samples[0].trajectory
        for name in ("tokens_T", "logprobs_T", "versions_T", "loss_mask_T"):
            assert np.array_equal(getattr(sample.trajectory, name), getattr(expected, name), equal_nan=False)


def test_stream_that_ends_early_or_holds_something_else_is_refused() -> None:
    stream = io.BytesIO()
    write_batch(stream, batch_of(1, 3))
    whole = stream.getvalue()
    for data in (b"", whole[:3], whole[:-1], b"\xff" * 50, b"\x01\0\0\0\xc1", b"\x01\0\0\0\x90"):
        with pytest.raises(WireError):
            read_batch(io.BytesIO(data))
