"""Segments and trajectories are checked when they are made: one that cannot be trained on cannot exist."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from areal_like.trajectory import Segment, Trajectory, as_experts, check_disjoint, repeated_answers


def _segment(logprobs=(-1.0, -0.5, 0.0), versions=(3, 3, 4), tokens=(7, 8, 9)) -> Segment:
    return Segment(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32))


def test_a_segment_knows_its_versions_and_can_be_cut_and_joined():
    whole = _segment()
    assert (len(whole), whole.first_version, whole.last_version) == (3, 3, 4)
    assert whole.tail(2).versions_R.tolist() == [4]
    assert _segment().tail(0).joined(_segment(versions=(4, 5, 6))).versions_R.tolist() == [3, 3, 4, 4, 5, 6]
    assert len(Segment.empty().joined(whole)) == len(whole.joined(Segment.empty())) == 3
    with pytest.raises(ValueError, match="non-decreasing within an answer"):
        whole.joined(_segment())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_log_probs_that_are_none_are_refused(bad, place):
    logprobs = [-1.0, -1.0, -1.0]
    logprobs[place] = bad
    with pytest.raises(ValueError, match="finite and at most 0"):
        _segment(logprobs=logprobs)


@pytest.mark.parametrize("versions", [(-1, 0, 0), (4, 3, 3), (3, 4, 3)])
def test_versions_that_go_back_are_refused(versions):
    with pytest.raises(ValueError, match="non-decreasing within an answer"):
        _segment(versions=versions)


def test_arrays_of_another_length_kind_or_shape_are_refused():
    with pytest.raises(ValueError, match="versions_R has 2 entries, expected 3"):
        _segment(versions=(3, 3))
    with pytest.raises(ValueError, match="logprobs_R must be float32"):
        Segment(np.zeros(1, np.int32), np.zeros(1, np.float64), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="one-dimensional"):
        Segment(np.zeros(1, np.int32), np.zeros((1, 1), np.float32), np.zeros(1, np.int32))


def test_a_trajectory_holds_the_prompt_without_versions():
    made = Trajectory.from_prompt(np.array([1, 2], np.int32), _segment(), "stop")
    assert made.tokens_T.tolist() == [1, 2, 7, 8, 9]
    assert made.versions_T.tolist() == [-1, -1, 3, 3, 4]
    assert made.loss_mask_T.tolist() == [False, False, True, True, True]
    assert (made.num_sampled, made.first_version, made.last_version) == (3, 3, 4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"versions_T": [-1, 3, 2]}, "non-decreasing over sampled tokens"),
        ({"versions_T": [-1, -1, 2]}, "non-decreasing over sampled tokens"),
        ({"versions_T": [0, 3, 3]}, "must be -1 where"),
        ({"logprobs_T": [-0.5, -1.0, -1.0]}, "must be 0.0 where"),
        ({"logprobs_T": [0.0, np.nan, -1.0]}, "must be finite"),
        ({"loss_mask_T": [False, False, False]}, "at least one sampled token"),
    ],
)
def test_trajectories_that_contradict_themselves_are_refused(changed, words):
    arrays = {
        "tokens_T": [1, 7, 8], "loss_mask_T": [False, True, True], "logprobs_T": [0.0, -1.0, -1.0],
        "versions_T": [-1, 3, 3], **changed,
    }  # fmt: skip
    kinds = {"tokens_T": np.int32, "loss_mask_T": np.bool_, "logprobs_T": np.float32, "versions_T": np.int32}
    with pytest.raises(ValueError, match=words):
        Trajectory(**{name: np.array(arrays[name], kind) for name, kind in kinds.items()}, finish_reason="stop")


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        (np.array([0, -1], np.float32), "teacher_logprobs_T has 2 entries, expected 3"),
        (np.array([0, -1, -1], np.float64), "teacher_logprobs_T must be float32"),
        (np.array([-1, -1, -1], np.float32), "teacher_logprobs_T must be 0.0 where"),
        (np.array([np.nan, -1, -1], np.float32), "teacher_logprobs_T must be 0.0 where"),
    ],
)
def test_log_probs_of_a_teacher_are_those_of_sampled_tokens(logprobs, words):
    made = Trajectory.from_prompt(np.array([1], np.int32), _segment().head(2), "stop")
    with pytest.raises(ValueError, match=words):
        msgspec.structs.replace(made, teacher_logprobs_T=logprobs)


def test_a_teacher_that_rules_a_token_out_is_refused_by_the_trainer_and_not_here():
    made = Trajectory.from_prompt(np.array([1], np.int32), _segment().head(2), "stop")
    assert made.teacher_logprobs_T is None
    taught = msgspec.structs.replace(made, teacher_logprobs_T=np.array([0, -np.inf, np.nan], np.float32))
    assert taught.teacher_logprobs_T[1] == -np.inf


def _routed(experts: np.ndarray) -> Trajectory:
    """Two prompt tokens and three answer tokens, whose four positions but the last have experts."""
    return Trajectory.from_prompt(np.array([1, 2], np.int32), _segment(), "stop", experts)


@pytest.mark.parametrize(("most", "kind"), [(255, np.uint8), (256, np.uint16), (65_535, np.uint16)])
def test_experts_of_every_position_but_the_last_are_kept_in_the_smallest_type(most, kind):
    experts = np.zeros((4, 2, 3), np.int32)
    experts[1, 0, 2] = most
    kept = _routed(experts).routed_experts
    assert kept is not None
    assert kept.dtype == kind
    assert np.array_equal(kept, experts)


def test_a_trajectory_has_no_experts_unless_they_are_given():
    assert Trajectory.from_prompt(np.array([1, 2], np.int32), _segment(), "stop").routed_experts is None


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (np.zeros((5, 2, 3), np.int32), "5 positions, expected 4"),
        (np.zeros((4, 2), np.int32), "must be a 3-D array"),
        (np.full((4, 2, 3), -1, np.int32), "from 0 to 65535"),
        (np.full((4, 2, 3), 65_536, np.int32), "from 0 to 65535"),
        (np.arange(-1, 23).reshape(4, 2, 3), "from 0 to 65535"),
        (np.arange(65_513, 65_537).reshape(4, 2, 3), "from 0 to 65535"),
    ],
)
def test_experts_that_cannot_be_are_refused(experts, words):
    with pytest.raises(ValueError, match=words):
        _routed(experts)


def test_experts_of_another_type_are_refused_by_the_contract():
    whole = _routed(np.zeros((4, 2, 3), np.int32))
    with pytest.raises(ValueError, match="uint8 or uint16"):
        Trajectory(
            whole.tokens_T, whole.loss_mask_T, whole.logprobs_T, whole.versions_T, "stop", np.zeros((4, 2, 3), np.int64)
        )


def test_a_log_prob_may_exceed_zero_by_rounding_alone():
    assert len(_segment(logprobs=(0.0009, -1.0, -1.0))) == 3
    with pytest.raises(ValueError, match="finite and at most 0"):
        _segment(logprobs=(0.0011, -1.0, -1.0))


def test_an_empty_segment_has_no_version():
    assert (Segment.empty().first_version, Segment.empty().last_version) == (-1, -1)


def test_version_zero_is_a_valid_version_of_every_token():
    made = Trajectory.from_prompt(np.array([1], np.int32), _segment(versions=(0, 0, 0)), "length")
    assert (made.first_version, made.last_version, made.finish_reason) == (0, 0, "length")


def test_no_experts_at_all_are_kept_in_the_smallest_type():
    assert as_experts(np.zeros((0, 2, 3), np.int64)).dtype == np.uint8


@pytest.mark.parametrize("name", ["tokens_T", "loss_mask_T", "logprobs_T", "versions_T"])
def test_every_array_of_a_trajectory_has_its_type_and_the_length_of_all(name):
    arrays = {
        "tokens_T": np.array([1, 7, 8], np.int32), "loss_mask_T": np.array([False, True, True]),
        "logprobs_T": np.array([0.0, -1.0, -1.0], np.float32), "versions_T": np.array([-1, 3, 3], np.int32),
    }  # fmt: skip
    Trajectory(**arrays, finish_reason="stop")
    with pytest.raises(ValueError, match=f"{name} must be"):
        Trajectory(**{**arrays, name: arrays[name].astype(np.int64)}, finish_reason="stop")
    if name != "tokens_T":
        with pytest.raises(ValueError, match=f"{name} has 2 entries, expected 3"):
            Trajectory(**{**arrays, name: arrays[name][:2]}, finish_reason="stop")


def test_segments_and_trajectories_cannot_be_changed_after_their_checks():
    segment = _segment()
    trajectory = Trajectory.from_prompt(np.array([1], np.int32), segment, "stop")
    for made, name in ((segment, "tokens_R"), (trajectory, "tokens_T")):
        with pytest.raises(AttributeError):
            setattr(made, name, np.zeros(0, np.int32))


def test_joining_nothing_copies_nothing():
    segment = _segment()
    assert Segment.empty().joined(segment) is segment
    assert segment.joined(Segment.empty()) is segment


@pytest.mark.parametrize(
    ("ends", "rewards", "words"),
    [
        ([1, 3], None, "must be passed together"),
        (None, [1.0], "must be passed together"),
        ([1, 2], [0.0, 1.0], "must be positive and strictly increasing, and its last entry must be 3,"),
        ([0, 3], [0.0, 1.0], "strictly increasing"),
        ([2, 2, 3], [0.0, 1.0, 0.0], "strictly increasing"),
        ([], [], "strictly increasing"),
        ([1, 3], [0.0], "turn_rewards_K has 1 entries, expected 2"),
        ([1, 3], [0.0, np.nan], "must be finite"),
    ],
)
def test_turns_end_one_after_the_other_at_the_last_sampled_token(ends, rewards, words):
    fields = {
        "turn_ends_K": None if ends is None else np.array(ends, np.int32),
        "turn_rewards_K": None if rewards is None else np.array(rewards, np.float32),
    }
    plain = Trajectory.from_prompt(np.array([1, 2], np.int32), _segment(), "stop")
    with pytest.raises(ValueError, match=words):
        msgspec.structs.replace(plain, **fields)


def _answers(ids: list[int] | None, ends: list[int] | None = None) -> Trajectory:
    plain = Trajectory.from_prompt(np.array([1, 2], np.int32), _segment(), "stop")
    if ids is None:
        return plain
    ends = ends or [*range(1, len(ids)), 3]
    return msgspec.structs.replace(
        plain, answer_ends_A=np.array(ends, np.int32), answer_ids_A=np.array(ids, np.int32)
    )  # fmt: skip


def test_each_answer_of_a_sample_is_trained_on_in_one_trajectory():
    check_disjoint([_answers(None)])
    check_disjoint([_answers([0, 1]), _answers([2])])
    with pytest.raises(ValueError, match="does not record which answers it contains"):
        check_disjoint([_answers([0]), _answers(None)])
    with pytest.raises(ValueError, match="answer 1 of the sample would be trained on twice"):
        check_disjoint([_answers([0, 1]), _answers([1, 2])])


def test_answers_that_are_trained_on_more_than_once_are_found_in_order():
    assert repeated_answers([]) == repeated_answers([_answers(None)]) == []
    assert repeated_answers([_answers([0, 1]), _answers(None)]) == []
    assert repeated_answers([_answers([0, 2, 5]), _answers([5]), _answers([2]), _answers([2])]) == [2, 5]


def test_turns_are_counted_by_answers_or_else_by_runs_of_sampled_tokens():
    assert _answers([4, 7]).num_turns == 2
    mask = [True, True, False, True, False, False, True]
    arrays = {
        "tokens_T": np.zeros(7, np.int32), "loss_mask_T": np.array(mask), "logprobs_T": np.zeros(7, np.float32),
        "versions_T": np.where(mask, 0, -1).astype(np.int32),
    }  # fmt: skip
    made = Trajectory(**arrays, finish_reason="stop")
    assert (made.num_turns, made.num_sampled, len(made)) == (3, 4, 7)


def test_head_and_tail_of_a_segment_are_the_whole():
    whole = _segment()
    for place in range(4):
        head, tail = whole.head(place), whole.tail(place)
        assert (len(head), len(tail)) == (place, 3 - place)
        joined = head.joined(tail)
        for name in ("tokens_R", "logprobs_R", "versions_R"):
            assert getattr(joined, name).tolist() == getattr(whole, name).tolist()
