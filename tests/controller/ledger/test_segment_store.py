"""Token payloads of the ledger, as bytes and back."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest
from real_ledger import segment_of

from areal_like.trajectory import FinishReason, Trajectory
from areal_like.turn_checkpoint import TurnCheckpoint
from controller.ledger.segment_store import (
    pack_segment,
    pack_trajectory,
    unpack_checkpoint,
    unpack_segment,
    unpack_trajectory,
)
from controller.ledger.trajectory_cache import _size

PROMPT = np.arange(3, dtype=np.int32)


def trajectory(experts: np.ndarray | None = None) -> Trajectory:
    return Trajectory.from_prompt(PROMPT, segment_of([1, 1, 2]), "stop", experts)


@pytest.mark.parametrize("num_experts", [8, 512])
def test_experts_are_stored_with_their_sample(num_experts: int) -> None:
    experts = np.random.default_rng(1).integers(0, num_experts, (5, 6, 4), np.int32)
    experts[0, 0, 0] = num_experts - 1
    stored, text = unpack_trajectory(pack_trajectory(trajectory(experts), "answer"))
    assert text == "answer"
    assert stored.routed_experts is not None
    assert np.array_equal(stored.routed_experts, experts)
    assert np.array_equal(stored.tokens_T, trajectory().tokens_T)


def test_a_sample_without_experts_has_none_after_it_was_stored() -> None:
    assert unpack_trajectory(pack_trajectory(trajectory(), ""))[0].routed_experts is None


def test_a_record_of_a_run_before_there_were_experts_is_read() -> None:
    fields = msgspec.msgpack.decode(pack_trajectory(trajectory(), "answer"))
    stored, text = unpack_trajectory(msgspec.msgpack.encode(fields[:6]))
    assert (text, stored.routed_experts) == ("answer", None)
    assert np.array_equal(stored.versions_T, trajectory().versions_T)


@pytest.mark.parametrize(("place", "value"), [(7, "float64"), (8, (5, 6, 5)), (8, (4, 6, 5))])
def test_experts_that_do_not_fit_their_record_are_refused(place: int, value: object) -> None:
    fields = msgspec.msgpack.decode(pack_trajectory(trajectory(np.zeros((5, 6, 4), np.int32)), ""))
    fields[place] = value
    with pytest.raises(ValueError):
        unpack_trajectory(msgspec.msgpack.encode(fields))


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
    plain = pack_segment(segment_of([1]))
    assert unpack_checkpoint(plain) is None
    assert unpack_checkpoint(msgspec.msgpack.encode(msgspec.msgpack.decode(plain)[:9])) is None


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_why_a_sample_ended_is_kept(reason: FinishReason) -> None:
    made = msgspec.structs.replace(trajectory(), finish_reason=reason)
    assert unpack_trajectory(pack_trajectory(made, ""))[0].finish_reason == reason


def test_a_record_that_ended_in_no_known_way_is_refused() -> None:
    made = msgspec.structs.replace(trajectory(), finish_reason="vanished")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ended by 'vanished'"):
        unpack_trajectory(pack_trajectory(made, ""))
