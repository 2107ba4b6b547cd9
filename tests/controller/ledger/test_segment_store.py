"""Token payloads of the ledger, as bytes and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from real_ledger import segment_of

from areal_like.errors import LedgerError
from areal_like.trajectory import FinishReason, Trajectory
from areal_like.turn_checkpoint import TurnCheckpoint
from controller.ledger import segment_store
from controller.ledger.segment_store import (
    Location,
    SegmentStore,
    pack_sample,
    pack_segment,
    unpack_checkpoint,
    unpack_sample,
    unpack_segment,
)
from controller.ledger.trajectory_cache import _size
from tests.open_descriptors import open_below

PROMPT = np.arange(3, dtype=np.int32)
IS_LINUX = sys.platform == "linux"


def trajectory(experts: np.ndarray | None = None) -> Trajectory:
    return Trajectory.from_prompt(PROMPT, segment_of([1, 1, 2]), "stop", experts)


@pytest.mark.parametrize("num_experts", [8, 512])
def test_experts_are_stored_with_their_sample(num_experts: int) -> None:
    experts = np.random.default_rng(1).integers(0, num_experts, (5, 6, 4), np.int32)
    experts[0, 0, 0] = num_experts - 1
    (stored,), text = unpack_sample(pack_sample((trajectory(experts),), "answer"))
    assert text == "answer"
    assert stored.routed_experts is not None
    assert np.array_equal(stored.routed_experts, experts)
    assert np.array_equal(stored.tokens_T, trajectory().tokens_T)


def test_a_sample_without_experts_has_none_after_it_was_stored() -> None:
    assert unpack_sample(pack_sample((trajectory(),), ""))[0][0].routed_experts is None


def test_rewards_by_turn_are_stored_with_their_sample() -> None:
    turns = {"turn_ends_K": np.array([1, 3], np.int32), "turn_rewards_K": np.array([0.5, -1.0], np.float32)}
    (stored,), _ = unpack_sample(pack_sample((msgspec.structs.replace(trajectory(), **turns),), ""))
    assert all(np.array_equal(getattr(stored, name), value) for name, value in turns.items())
    assert unpack_sample(pack_sample((trajectory(),), ""))[0][0].turn_ends_K is None


def test_a_record_of_a_run_before_there_were_experts_is_read() -> None:
    fields = msgspec.msgpack.decode(pack_sample((trajectory(),), "answer"))
    (stored,), text = unpack_sample(msgspec.msgpack.encode(fields[:6]))
    assert (text, stored.routed_experts) == ("answer", None)
    assert np.array_equal(stored.versions_T, trajectory().versions_T)


@pytest.mark.parametrize(("place", "value"), [(7, "float64"), (8, (5, 6, 5)), (8, (4, 6, 5))])
def test_experts_that_do_not_fit_their_record_are_refused(place: int, value: object) -> None:
    fields = msgspec.msgpack.decode(pack_sample((trajectory(np.zeros((5, 6, 4), np.int32)),), ""))
    fields[place] = value
    with pytest.raises(ValueError):
        unpack_sample(msgspec.msgpack.encode(fields))


def test_experts_count_in_the_memory_of_kept_samples() -> None:
    assert _size(trajectory(np.zeros((5, 6, 4), np.int32))) - _size(trajectory()) == 5 * 6 * 4


def test_turns_are_stored_with_partial_tokens_and_older_records_have_none() -> None:
    given = np.array([5, 6, 7], np.int32)
    stored = TurnCheckpoint(given_places_G=np.array([0, 0, 2], np.int32), given_tokens_G=given, num_turns=2, state=b"s")
    payload = pack_segment(segment_of([1, 1]), stored)
    assert unpack_segment(payload).tokens_R.tolist() == segment_of([1, 1]).tokens_R.tolist()
    found = unpack_checkpoint(payload)
    assert found is not None
    assert found.given_tokens_G.tolist() == [5, 6, 7]
    assert found.given_places_G.tolist() == [0, 0, 2]
    assert (found.num_turns, found.state) == (2, b"s")
    first = unpack_checkpoint(pack_segment(segment_of([1]), msgspec.structs.replace(stored, num_turns=0)))
    assert first is not None
    assert first.num_turns == 0, "an episode may have a state before its first answer"
    assert (found.answer_ends_A, found.answer_ids_A) == (None, None)
    ends, ids = np.array([1, 2], np.int32), np.array([0, 3], np.int32)
    numbered = msgspec.structs.replace(stored, answer_ends_A=ends, answer_ids_A=ids)
    answers = unpack_checkpoint(pack_segment(segment_of([1, 1]), numbered))
    assert answers is not None
    assert answers.answer_ends_A is not None
    assert answers.answer_ids_A is not None
    assert (answers.answer_ends_A.tolist(), answers.answer_ids_A.tolist()) == ([1, 2], [0, 3])
    plain = pack_segment(segment_of([1]))
    assert unpack_checkpoint(plain) is None
    assert unpack_checkpoint(msgspec.msgpack.encode(msgspec.msgpack.decode(plain)[:9])) is None


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_why_a_sample_ended_is_kept(reason: FinishReason) -> None:
    made = msgspec.structs.replace(trajectory(), finish_reason=reason)
    assert unpack_sample(pack_sample((made,), ""))[0][0].finish_reason == reason


def test_a_record_that_ended_in_no_known_way_is_refused() -> None:
    made = msgspec.structs.replace(trajectory(), finish_reason="vanished")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown finish reason of a trajectory: 'vanished'"):
        unpack_sample(pack_sample((made,), ""))


# ------------------------------------------------------------ files


def opened(folder: Path, *, segment_bytes: int = 1000, fsync: bool = False) -> SegmentStore:
    return SegmentStore(folder, segment_bytes=segment_bytes, fsync=fsync)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def open_files(folder: Path) -> list[str]:
    """Names of the folder's files that this process has open; a deleted one too."""
    return sorted(Path(target).name for target in open_below(folder))


def test_records_are_read_back_from_where_they_were_said_to_be(tmp_path: Path) -> None:
    store = opened(tmp_path / "segments")
    first, second = store.append(b"one"), store.append(b"")
    assert (first, second) == (Location(1, 0, 15), Location(1, 15, 12))
    store.flush()
    third = store.append(b"three")
    assert third == Location(1, 27, 17), "the end of the file is known after it was written"
    store.flush()
    assert [store.read(place) for place in (third, first, second)] == [b"three", b"one", b""]
    assert store.sizes() == {1: 44}


def test_what_is_queued_is_not_on_disk_before_it_is_flushed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.flush()
    assert names(tmp_path) == []
    place = store.append(b"one")
    with pytest.raises(LedgerError, match="the file is truncated"):
        store.read(place)
    store.flush()
    assert store.read(place) == b"one"


def test_a_file_that_has_its_size_is_followed_by_the_next_one(tmp_path: Path) -> None:
    store = opened(tmp_path, segment_bytes=30)
    places = [store.append(bytes(3)) for _ in range(5)]
    assert [place.file for place in places] == [1, 1, 2, 2, 3], "30 bytes are full, 15 are not"
    store.flush()
    assert store.sizes() == {1: 30, 2: 30, 3: 15}
    assert all(store.read(place) == bytes(3) for place in places)


def test_every_life_begins_a_new_file_behind_all_that_are_there(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.append(b"one")
    first.flush()
    (tmp_path / "000007.seg").write_bytes(b"")
    (tmp_path / "000009.seg.part").write_bytes(b"x")
    second = opened(tmp_path)
    assert second.writing is None
    assert second.append(b"two").file == 8
    assert second.writing == 8
    assert second.sizes() == {1: 15, 7: 0, 8: 0}
    assert second.path(8).stat().st_mode & 0o133 == 0, "for others to read at most"


def test_a_failed_transaction_leaves_nothing_and_what_follows_goes_to_a_new_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    kept = store.append(b"kept")
    store.flush()
    lost = store.append(b"lost")
    store.discard()
    assert store.writing is None
    place = store.append(b"next")
    assert place == Location(2, 0, 16)
    store.flush()
    assert store.read(kept) == b"kept"
    assert store.read(place) == b"next"
    with pytest.raises(LedgerError):
        store.read(lost)


def test_a_write_that_the_system_cuts_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "writev", lambda fd, parts: write(fd, b"".join(parts)[:7]))
    monkeypatch.setattr(os, "write", lambda fd, rest: write(fd, rest[:5]))
    store = opened(tmp_path)
    places = [store.append(payload) for payload in (b"the first one", b"the second one")]
    store.flush()
    assert [store.read(place) for place in places] == [b"the first one", b"the second one"]
    assert store.append(b"x").offset == sum(place.size for place in places)


def test_more_records_than_one_call_writes_are_all_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_store, "MAX_IOVEC", 4)
    store = opened(tmp_path)
    places = [store.append(b"%d" % number) for number in range(7)]
    store.flush()
    assert [store.read(place) for place in places] == [b"%d" % number for number in range(7)]


@pytest.mark.parametrize("fsync", [True, False])
def test_what_is_flushed_is_synchronised_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    synchronised: list[int] = []
    monkeypatch.setattr(os, "fsync", synchronised.append)
    store = opened(tmp_path, fsync=fsync)
    store.append(b"one")
    store.flush()
    store.flush()
    assert len(synchronised) == 2 * fsync, "the folder, when the file was made, and the file"


@pytest.mark.parametrize("position", [0, 5, 9, 12, 14])
def test_a_record_with_any_byte_changed_is_damaged(tmp_path: Path, position: int) -> None:
    store = opened(tmp_path)
    place = store.append(b"one")
    store.flush()
    data = bytearray(store.path(1).read_bytes())
    data[position] ^= 1
    store.path(1).write_bytes(data)
    with pytest.raises(LedgerError, match=r"000001\.seg at byte 0: the record is damaged"):
        store.read(place)


def test_a_record_of_a_file_that_is_gone_or_cut_says_where(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append(b"one")
    place = store.append(b"two")
    store.flush()
    os.truncate(store.path(1), 29)
    with pytest.raises(LedgerError, match=r"000001\.seg at byte 15: the file is truncated"):
        store.read(place)
    with pytest.raises(LedgerError, match=r"cannot read .*000005\.seg at byte 3"):
        store.read(Location(5, 3, 20))


def test_a_deleted_file_gives_its_bytes_and_cannot_be_read_any_more(tmp_path: Path) -> None:
    store = opened(tmp_path)
    place = store.append(b"one")
    store.flush()
    store.discard()
    assert store.read(place) == b"one"
    assert store.delete(1) == 15
    if IS_LINUX:
        assert open_files(tmp_path) == []
    assert store.delete(1) == 0
    assert names(tmp_path) == []
    with pytest.raises(LedgerError):
        store.read(place)


def test_at_most_sixty_four_files_are_open_for_reading_and_close_closes_all(tmp_path: Path) -> None:
    store = opened(tmp_path, segment_bytes=1)
    places = [store.append(b"one") for _ in range(66)]
    store.flush()
    for _ in range(2):
        assert all(store.read(place) == b"one" for place in places)
    if IS_LINUX:
        assert len(open_files(tmp_path)) == 64 + 1, "one is written"
    store.close()
    assert store.writing is None
    if IS_LINUX:
        assert open_files(tmp_path) == []
    assert store.read(places[3]) == b"one", "and a file is opened again where it is wanted"
    store.close()


def test_a_segment_comes_back_as_it_was_and_bytes_that_are_none_are_refused() -> None:
    segment = segment_of([3, 3, 4], start=7)
    back = unpack_segment(pack_segment(segment))
    assert back.tokens_R.tolist() == [7, 8, 9]
    assert back.versions_R.tolist() == [3, 3, 4]
    assert back.logprobs_R.tolist() == [-0.5] * 3
    for broken in (b"", b"\x93\x01\x02\x03", msgspec.msgpack.encode([b"1234", b"", b""])):
        with pytest.raises(ValueError):
            unpack_segment(broken)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_sample_comes_back_with_how_it_ended(reason: FinishReason) -> None:
    made = Trajectory.from_prompt(PROMPT, segment_of([1]), reason)
    assert unpack_sample(pack_sample((made,), ""))[0][0].finish_reason == reason


def test_the_number_of_a_purged_file_is_not_used_again(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=1000, fsync=False, used=7)
    assert store.append(b"one").file == 8
    store.flush()
    assert SegmentStore(tmp_path, segment_bytes=1000, fsync=False, used=3).append(b"two").file == 9


def test_a_reader_creates_no_folder_and_survives_a_purge(tmp_path: Path) -> None:
    store = opened(tmp_path / "segments")
    assert store.sizes() == {}
    with pytest.raises(LedgerError, match="cannot read"):
        store.read(Location(1, 0, 15))
    assert not (tmp_path / "segments").exists()
    (tmp_path / "000004.seg").symlink_to(tmp_path / "gone")
    assert opened(tmp_path).sizes() == {}


def test_a_size_beyond_the_file_reserves_no_memory(tmp_path: Path) -> None:
    store = opened(tmp_path)
    place = store.append(b"one")
    store.flush()
    with pytest.raises(LedgerError, match="the file is truncated"):
        store.read(place._replace(size=1 << 50))
