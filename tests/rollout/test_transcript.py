"""A transcript of several turns: which tokens are trained on, with which log-probs and versions, and where it ends."""

from __future__ import annotations

import numpy as np
import pytest

from areal_like.trajectory import Segment
from rollout.transcript import Answer, Transcript


def segment(*tokens: int, version: int = 0, logprob: float = -0.5) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, logprob, np.float32), np.full(count, version, np.int32))


def answer(*tokens: int, version: int = 0, reason: str = "stop", **fields: object) -> Answer:
    return Answer(segment=segment(*tokens, version=version), finish_reason=reason, **fields)  # type: ignore[arg-type]


def test_sampled_and_given_tokens_keep_their_order_and_only_sampled_ones_are_trained() -> None:
    transcript = Transcript("ab", encode=lambda text: np.array([ord(one) for one in text], np.int32))
    transcript.sampled(answer(7, 8, version=2))
    transcript.given("c")
    transcript.given([9])
    transcript.sampled(segment(10, version=4, logprob=-2.0))
    assert (len(transcript), transcript.num_sampled, transcript.num_turns, transcript.last_version) == (7, 3, 2, 4)
    trajectory = transcript.close("stop")
    assert trajectory.tokens_T.tolist() == transcript.tokens_T.tolist() == [97, 98, 7, 8, 99, 9, 10]
    assert trajectory.loss_mask_T.tolist() == [False, False, True, True, False, False, True]
    assert trajectory.logprobs_T.tolist() == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -2.0]
    assert trajectory.versions_T.tolist() == [-1, -1, 2, 2, -1, -1, 4]


def test_any_order_of_turns_gives_arrays_that_put_each_token_where_it_was() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        prompt = rng.integers(0, 50, rng.integers(1, 5)).astype(np.int32)
        transcript, version = Transcript(prompt), 0
        expected = [(int(token), False, 0.0, -1) for token in prompt]
        for _ in range(rng.integers(1, 8)):
            tokens = rng.integers(0, 50, rng.integers(0, 4)).astype(np.int32)
            if rng.random() < 0.5:
                transcript.given(tokens)
                expected += [(int(token), False, 0.0, -1) for token in tokens]
            else:
                versions = version + np.sort(rng.integers(0, 3, len(tokens))).astype(np.int32)
                logprobs = -rng.random(len(tokens)).astype(np.float32)
                transcript.sampled(Segment(tokens, logprobs, versions))
                version = int(versions[-1]) if len(tokens) else version
                rows = zip(tokens.tolist(), logprobs.tolist(), versions.tolist(), strict=True)
                expected += [(token, True, logprob, stamp) for token, logprob, stamp in rows]
        if not transcript.num_sampled:
            continue
        made = transcript.close("length")
        columns = (made.tokens_T, made.loss_mask_T, made.logprobs_T, made.versions_T)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
        assert made.num_sampled == transcript.num_sampled == sum(map(len, transcript.segments()))


@pytest.mark.parametrize(
    ("tail", "reason"), [([], "length"), ([5], "environment")], ids=["after an answer", "after given tokens"]
)
def test_a_transcript_ends_as_its_last_answer_did_or_by_the_environment(tail: list[int], reason: str) -> None:
    transcript = Transcript([1])
    transcript.sampled(answer(7, reason="length"))
    transcript.given(tail)
    assert transcript.close().finish_reason == reason


def test_an_older_version_after_a_newer_one_is_refused() -> None:
    transcript = Transcript([1])
    transcript.sampled(answer(7, version=3))
    with pytest.raises(ValueError, match="sampled by version 2 cannot follow tokens of version 3"):
        transcript.sampled(answer(8, version=2))
    assert transcript.tokens_T.tolist() == [1, 7]


def test_an_answer_at_another_temperature_may_only_be_given() -> None:
    transcript = Transcript([1])
    greedy = answer(7, is_trainable=False)
    with pytest.raises(ValueError, match="its temperature is not that of the run"):
        transcript.sampled(greedy)
    transcript.given(greedy.segment.tokens_R)
    transcript.sampled(answer(8))
    assert transcript.close().loss_mask_T.tolist() == [False, False, True]


def test_an_empty_answer_changes_nothing_and_a_transcript_without_answers_is_no_trajectory() -> None:
    transcript = Transcript([1, 2])
    transcript.sampled(answer(reason="length"))
    assert (len(transcript), transcript.num_turns) == (2, 0)
    with pytest.raises(ValueError, match="at least one sampled token"):
        transcript.close()


def test_text_needs_an_encoder_and_tokens_one_dimension() -> None:
    with pytest.raises(TypeError, match="without a tokenizer"):
        Transcript("ab")
    with pytest.raises(ValueError, match="one-dimensional"):
        Transcript([1]).given(np.zeros((1, 2), np.int32))


def test_experts_of_the_last_answer_cover_the_whole_transcript_unless_more_was_given() -> None:
    experts = np.arange(12).reshape(3, 2, 2)
    for tail in ([], [9]):
        transcript = Transcript([1, 2])
        transcript.sampled(answer(7, 8, routed_experts=experts))
        transcript.given(tail)
        kept = transcript.close("stop").routed_experts
        assert (kept is None) if tail else np.array_equal(kept, experts)


def test_rewards_by_turn_cover_every_sampled_token() -> None:
    transcript = Transcript(np.array([5, 6], np.int32))
    transcript.sampled(answer(7, 8))
    transcript.given([9])
    transcript.sampled(answer(7))
    closed = transcript.close("length", turn_rewards=[(2, 0.5)])
    assert closed.turn_ends_K is not None
    assert closed.turn_rewards_K is not None
    assert (closed.turn_ends_K.tolist(), closed.turn_rewards_K.tolist()) == ([2, 3], [0.5, 0.0])
    assert transcript.close("length", turn_rewards=[(2, 0.5), (3, 1.0)]).turn_rewards_K.tolist() == [0.5, 1.0]
    assert transcript.close("length").turn_ends_K is None


def test_a_copied_transcript_stays_as_it_was_when_it_was_copied() -> None:
    made = Transcript("a", encode=lambda text: np.array([ord(one) for one in text], np.int32))
    made.sampled(answer(7, 8, version=3, reason="length"))
    copied = made.copied()
    made.given([5])
    made.sampled(answer(9, version=4))
    assert copied.tokens_T.tolist() == [97, 7, 8]
    assert (copied.num_sampled, copied.num_turns, copied.last_version) == (2, 1, 3)
    assert copied.close().finish_reason == "length"
    copied.given("b")
    assert (copied.tokens_T.tolist(), made.tokens_T.tolist()) == ([97, 7, 8, 98], [97, 7, 8, 5, 9])


def test_a_checkpoint_is_refused_without_the_sampled_tokens_before_its_given_ones() -> None:
    made = Transcript([1])
    made.sampled(segment(7, 8, 9))
    made.given([5])
    checkpoint = made.checkpoint(1, b"")
    assert Transcript.restored(segment(7, 8, 9), checkpoint).tokens_T.tolist() == [1, 7, 8, 9, 5]
    with pytest.raises(ValueError, match="a given token after 3 sampled tokens, but there are only 2"):
        Transcript.restored(segment(7, 8), checkpoint)
