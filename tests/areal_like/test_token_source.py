"""Which model sampled which tokens: runs of versions, and what a trajectory refuses."""

from __future__ import annotations

import numpy as np
import pytest

from areal_like.token_source import TokenSource, check_sources, sources_of, trained_models
from areal_like.trajectory import Segment
from rollout.transcript import Answer, Transcript

MASK_T = np.array([False, True, True, False, False])
VERSIONS_T = np.array([-1, 3, 4, -1, -1], np.int32)


def answer(model: str, *versions: int, number: int = -1, is_trainable: bool = True) -> Answer:
    segment = Segment(
        np.arange(len(versions), dtype=np.int32), np.full(len(versions), -0.5, np.float32), np.array(versions, np.int32)
    )
    return Answer(segment=segment, finish_reason="stop", model=model, number=number, is_trainable=is_trainable)


def test_an_answer_has_a_source_for_each_run_of_its_versions() -> None:
    assert sources_of("a", np.array([0, 0, 2, 5, 5], np.int32), 3) == [
        TokenSource("a", 0, 3, 5), TokenSource("a", 2, 5, 6), TokenSource("a", 5, 6, 8)
    ]  # fmt: skip
    assert sources_of("a", np.zeros(0, np.int32), 3) == []


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([("a", 3, 1, 1)], "in order and within 5 tokens"),
        ([("a", 0, 4, 6)], "in order and within 5 tokens"),
        ([("a", 0, 3, 5), ("b", 0, 4, 5)], "in order and within 5 tokens"),
        ([("", 0, 3, 4)], "needs a model name"),
        ([("a" * 65, 0, 3, 4)], "needs a model name"),
        ([("a", -1, 3, 4)], "a version of at least 0"),
        ([("a", 3, 1, 3)], "must equal the version of the source"),
    ],
)
def test_sources_that_contradict_the_trajectory_are_refused(
    sources: list[tuple[str, int, int, int]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_sources([TokenSource(*one) for one in sources], MASK_T, VERSIONS_T)


def test_sources_may_cover_trained_and_given_tokens() -> None:
    sources = [TokenSource("a", 3, 1, 2), TokenSource("a", 4, 2, 3), TokenSource("judge", 0, 4, 5)]
    check_sources(sources, MASK_T, VERSIONS_T)
    assert trained_models(sources, MASK_T) == {"a"}


def test_a_transcript_keeps_sources_through_forks_copies_and_checkpoints() -> None:
    talk = Transcript([7, 7])
    talk.sampled(answer("first", 1, 2, number=0))
    talk.given(answer("judge", 0, 0, is_trainable=False))
    talk.given(answer("", 5))
    talk.given([9])
    expected = [("first", 1, 2, 3), ("first", 2, 3, 4), ("judge", 0, 4, 6), ("policy", 5, 6, 7)]
    restored = Transcript.restored(talk.sampled_tokens, talk.checkpoint(1, b"\xc0"))
    for one in (talk, talk.copied(), restored):
        assert [(s.model, s.version, s.start, s.end) for s in one.close().sources] == expected
    fork = talk.forked()
    fork.sampled(answer("second", 6, number=1))
    made = fork.close()
    assert [(s.model, s.start) for s in made.sources] == [(one[0], one[2]) for one in expected] + [("second", 8)]
    assert trained_models(made.sources, made.loss_mask_T) == {"second"}
    assert trained_models(talk.close().sources, talk.close().loss_mask_T) == {"first"}
