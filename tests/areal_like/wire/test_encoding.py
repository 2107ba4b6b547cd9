"""Claims about the encoding: everything honest survives, everything else is a WireError."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import WireError
from areal_like.trajectory import Segment, Trajectory
from areal_like.wire import encoding
from areal_like.wire.encoding import LARGE_BYTES, WireLimits, cut, decode, encode, join
from areal_like.wire.messages import (
    Batch,
    BatchSample,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    SampleReturned,
    SampleTask,
    Sampling,
)

ACCEPT = frozenset({Batch, Heartbeat, Hello, Lease, SampleReturned})


def segment(length: int) -> Segment:
    return Segment(np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32), np.full(length, 3, np.int32))


def returned(length: int) -> SampleReturned:
    return SampleReturned(lease_id=7, start=0, segment=segment(length), reason="drain")


def batch(lengths: list[int]) -> Batch:
    prompt = np.arange(3, dtype=np.int32)
    samples = tuple(
        BatchSample(
            group_id=i, sample_index=0, trajectory=Trajectory.from_prompt(prompt, segment(n), "stop"), reward=1.0
        )
        for i, n in enumerate(lengths)
    )
    return Batch(step=1, lineage="l0", samples=samples)


def lease(row: dict) -> Lease:
    task = SampleTask(
        lease_id=1, group_id=2, sample_index=3, purpose="train", min_version=0, row=row, sampling=Sampling(), seed=5,
        prefix=Segment.empty(),
    )  # fmt: skip
    return Lease(tasks=(task,))


@given(st.lists(st.integers(1, 300) | st.integers(16_000, 40_000), min_size=1, max_size=6))
@settings(max_examples=num_examples(40), deadline=None)
def test_batch_of_any_lengths_survives(lengths: list[int]) -> None:
    sent = batch(lengths)
    received = decode([bytes(frame) for frame in encode(sent)], ACCEPT)
    assert isinstance(received, Batch)
    for one, other in zip(sent.samples, received.samples, strict=True):
        for name in ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T"):
            mine, theirs = getattr(one.trajectory, name), getattr(other.trajectory, name)
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
            assert theirs.flags.aligned


@pytest.mark.parametrize("num_experts", [8, 512])
@pytest.mark.parametrize("length", [4, 3000])
def test_experts_travel_with_the_samples_that_have_them(num_experts: int, length: int) -> None:
    experts = np.random.default_rng(0).integers(0, num_experts, (length + 2, 6, 4), np.int32)
    experts[0, 0, 0] = num_experts - 1
    routed = Trajectory.from_prompt(np.arange(3, dtype=np.int32), segment(length), "stop", experts)
    plain = batch([length]).samples[0]
    sent = Batch(step=1, lineage="l0", samples=(plain, msgspec.structs.replace(plain, trajectory=routed)))
    received = decode([bytes(frame) for frame in encode(sent)], ACCEPT)
    assert isinstance(received, Batch)
    assert received.samples[0].trajectory.routed_experts is None
    got = received.samples[1].trajectory.routed_experts
    assert got is not None
    assert got.dtype == (np.uint8 if num_experts <= 256 else np.uint16)
    assert np.array_equal(got, experts)


def test_rewards_by_turn_travel_with_the_samples_that_have_them() -> None:
    plain = batch([4]).samples[0]
    turns = {"turn_ends_K": np.array([1, 4], np.int32), "turn_rewards_K": np.array([0.5, -1.0], np.float32)}
    with_turns = msgspec.structs.replace(plain.trajectory, **turns)
    sent = Batch(step=1, lineage="l0", samples=(plain, msgspec.structs.replace(plain, trajectory=with_turns)))
    received = decode([bytes(frame) for frame in encode(sent)], ACCEPT)
    assert isinstance(received, Batch)
    assert received.samples[0].trajectory.turn_ends_K is None
    got = received.samples[1].trajectory
    assert all(np.array_equal(getattr(got, name), value) for name, value in turns.items())


def test_all_trajectories_of_a_sample_travel_with_the_numbers_of_their_answers() -> None:
    [plain] = batch([4]).samples
    answers = [
        {"answer_ends_A": np.array(ends, np.int32), "answer_ids_A": np.array(ids, np.int32)}
        for ends, ids in (([1, 4], [0, 2]), ([4], [1]))
    ]
    main, other = (msgspec.structs.replace(plain.trajectory, **one) for one in answers)
    sent = Batch(step=1, lineage="l0", samples=(msgspec.structs.replace(plain, trajectory=main, others=(other,)),))
    received = decode([bytes(frame) for frame in encode(sent)], ACCEPT)
    assert isinstance(received, Batch)
    assert [one.answer_ids_A.tolist() for one in received.samples[0].trajectories] == [[0, 2], [1]]  # type: ignore[union-attr]


def test_large_arrays_are_not_copied_on_either_side() -> None:
    sent = returned(LARGE_BYTES)
    frames = encode(sent)
    assert np.shares_memory(np.frombuffer(frames[2], np.int32), sent.segment.tokens_R)
    received = decode(frames, ACCEPT)
    assert isinstance(received, SampleReturned)
    assert np.shares_memory(received.segment.tokens_R, sent.segment.tokens_R)


@pytest.mark.parametrize("length", [10, LARGE_BYTES])
def test_decoded_arrays_cannot_be_written(length: int) -> None:
    received = decode([bytearray(frame) for frame in encode(returned(length))], ACCEPT)  # type: ignore[misc]
    assert isinstance(received, SampleReturned)
    with pytest.raises(ValueError, match="read-only"):
        received.segment.tokens_R[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        received.segment.tokens_R.flags.writeable = True


def test_misaligned_frames_decode_aligned() -> None:
    frames = [memoryview(b"x" + bytes(frame))[1:] for frame in encode(returned(LARGE_BYTES))]
    received = decode(frames, ACCEPT)
    assert isinstance(received, SampleReturned)
    assert received.segment.tokens_R.flags.aligned
    assert np.array_equal(received.segment.tokens_R, np.arange(LARGE_BYTES))


def test_an_array_of_eight_dimensions_travels() -> None:
    received = decode(encode(lease({"array": np.ones((1,) * 7 + (3,))})), ACCEPT)
    assert isinstance(received, Lease)
    assert received.tasks[0].row["array"].shape == (1,) * 7 + (3,)


def test_arrays_and_numpy_scalars_travel_in_untyped_rows() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)[:, ::2]
    received = decode(encode(lease({"pixels": pixels, "score": np.float32(0.5), "nothing": np.zeros((0, 4))})), ACCEPT)
    assert isinstance(received, Lease)
    row = received.tasks[0].row
    assert np.array_equal(row["pixels"], pixels)
    assert row["score"] == 0.5
    assert row["nothing"].shape == (0, 4)


@pytest.mark.parametrize("value", [1j, object(), np.array(["text"]), np.array([object()]), 2**70, np.zeros((1,) * 9)])
def test_what_cannot_travel_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(WireError):
        encode(lease({"value": value}))


def test_message_of_a_type_not_accepted_is_refused() -> None:
    with pytest.raises(WireError, match="Goodbye"):
        decode(encode(Goodbye()), frozenset({Hello}))


def test_check_of_a_made_value_that_fails_during_decoding_is_a_wire_error() -> None:
    frames = encode(returned(4))
    versions_going_back = np.array([3, 2, 1, 0], np.int32).tobytes()
    with pytest.raises(WireError, match="non-decreasing within an answer"):
        decode([frames[0], bytes(frames[1][:32]) + versions_going_back], ACCEPT)


def test_bool_array_of_other_bytes_than_0_and_1_is_refused() -> None:
    frames = encode(batch([20]))
    mask_at = 96  # after 23 int32 tokens, padded
    assert frames[1][mask_at : mask_at + 4] == b"\0\0\0\1"
    broken = bytearray(frames[1])
    broken[mask_at] = 7
    with pytest.raises(WireError, match="bool"):
        decode([frames[0], bytes(broken)], ACCEPT)


def test_size_limits_are_enforced() -> None:
    frames = encode(batch([100] * 10))
    for limits in (
        WireLimits(max_frames=1),
        WireLimits(max_header_bytes=len(frames[0]) - 1),
        WireLimits(max_message_bytes=sum(map(len, frames)) - 1),
    ):
        with pytest.raises(WireError):
            decode(frames, ACCEPT, limits)


def test_a_message_exactly_at_its_limits_is_taken() -> None:
    frames = encode(batch([100] * 10))
    limits = WireLimits(
        max_frames=len(frames), max_header_bytes=len(frames[0]), max_message_bytes=sum(map(len, frames))
    )
    decode(frames, ACCEPT, limits)
    with pytest.raises(WireError, match=f"has 0 frames, expected 1 to {len(frames)}$"):
        decode([], ACCEPT, limits)


def test_a_piece_is_half_of_the_longest_frame_that_a_connection_may_announce() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert "| one frame, also before the handshake | 512 KiB;" in page
    assert [len(piece) for piece in cut([bytes(600 * 1024)])[1:]] == [256 * 1024, 256 * 1024, 88 * 1024]


def test_frames_longer_than_a_piece_travel_in_pieces_behind_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_FRAME_BYTES", 4)
    limits = WireLimits(max_frames=4, max_message_bytes=100)
    whole = [b"abcd", b"", b"x"]
    assert cut(whole) == whole
    assert join(whole, limits) == whole
    assert join([], limits) == []
    frames = [b"abcdefghi", b"", b"1234", b"12345678"]
    table, *pieces = cut(frames)
    assert [bytes(piece) for piece in pieces] == [b"abcd", b"efgh", b"i", b"", b"1234", b"1234", b"5678"]
    joined = join([table, *pieces], limits)
    assert [bytes(frame) for frame in joined] == frames
    assert joined[2] is pieces[4], "a frame that travelled whole is not copied"
    for broken, words in (
        ([table, *pieces[:-1]], "do not match its table"),
        ([table, *pieces, b"x"], "more pieces than its table lists"),
        ([table, *pieces[1:], pieces[0]], "do not match its table"),
        ([table[:1], *pieces], "the table of a message in several pieces is invalid"),
        ([table[:1] + b"\xa1a", *pieces], "the table of a message in several pieces is invalid"),
    ):
        with pytest.raises(WireError, match=words):
            join(broken, limits)


def test_pieces_of_a_message_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_FRAME_BYTES", 4)
    pieces = cut([b"abcdefgh"])
    num_bytes = sum(map(len, pieces))
    for limits, is_taken in (
        (WireLimits(max_frames=1, max_message_bytes=num_bytes), True),
        (WireLimits(max_frames=1, max_message_bytes=num_bytes - 1), False),
    ):
        if is_taken:
            assert join(pieces, limits) == [b"abcdefgh"]
        else:
            with pytest.raises(WireError, match="exceeds the limit"):
                join(pieces, limits)
    limits = WireLimits(max_frames=2, max_message_bytes=11)  # two frames, two pieces of them, and the table
    table = pieces[0][:1] + msgspec.msgpack.encode([0] * 4)
    assert join([table, *[b""] * 4], limits) == [b""] * 4
    with pytest.raises(WireError, match="message of 6 pieces"):
        join([pieces[0][:1] + msgspec.msgpack.encode([0] * 5), *[b""] * 5], limits)


def test_deeply_nested_message_is_refused() -> None:
    row = b"\x81\xa1a" * 100_000 + b"\xc0"
    with pytest.raises(WireError):
        decode([b"\x82\xa4type\xa5Lease\xa5tasks\x91\x81\xa3row" + row], ACCEPT)


def test_descriptor_pointing_outside_is_refused() -> None:
    for frame, offset, count in ((0, 0, 1000), (0, 3, 1), (5, 0, 1), (0, 2**63, 1), (0, 0, 2**62)):
        descriptor = (
            b"\x05\x01" + frame.to_bytes(4, "little") + offset.to_bytes(8, "little") + count.to_bytes(8, "little")
        )
        header = msgspec.msgpack.encode(
            {"type": "SampleReturned", "lease_id": 1, "start": 0, "reason": "",
             "segment": dict.fromkeys(("tokens_R", "logprobs_R", "versions_R"), msgspec.msgpack.Ext(1, descriptor))}
        )  # fmt: skip
        with pytest.raises(WireError):
            decode([header, bytes(64)], ACCEPT)


FRAMES = [encode(returned(5)), encode(batch([4, 9])), encode(lease({"prompt": "x"})), encode(Heartbeat(state="s"))]


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=num_examples(300), deadline=None)
def test_random_frames_never_raise_anything_but_wire_error(frames: list[bytes]) -> None:
    try:
        decode(frames, ACCEPT)
    except WireError:
        pass


@given(st.sampled_from(FRAMES), st.data())
@settings(max_examples=num_examples(500), deadline=None)
def test_flipped_cut_or_missing_bytes_never_raise_anything_but_wire_error(
    frames: list[bytes], data: st.DataObject
) -> None:
    broken = [bytearray(frame) for frame in frames]
    for _ in range(data.draw(st.integers(1, 4))):
        target = broken[data.draw(st.integers(0, len(broken) - 1))]
        if not target:
            continue
        position = data.draw(st.integers(0, len(target) - 1))
        if data.draw(st.booleans()):
            target[position] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del target[position:]
    if data.draw(st.integers(0, 4)) == 0:
        broken.pop()
    try:
        decode([bytes(frame) for frame in broken], ACCEPT)
    except WireError:
        pass
