"""Stop strings: where an answer ends, wherever the borders of its tokens are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.answering import answer_of, call_sampling, end_of
from rollout.engine.port import GenerationRequest
from rollout.engine.requests import ended_already
from rollout.stop_strings import StopStrings

PIECES = ["a", "b", "</", "an", "swer", ">", "</answer>", "x</an", "swer>y", "é", " "]


def decode(tokens_R: np.ndarray) -> str:
    return "".join(PIECES[one] for one in tokens_R)


def first_end(tokens: list[int], strings: list[str]) -> int | None:
    """The oracle: decode all of it for every length."""
    lengths = range(1, len(tokens) + 1)
    return next((n for n in lengths if any(one in decode(np.array(tokens[:n])) for one in strings)), None)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_ends_with_the_first_token_after_which_its_text_has_a_stop_string(seed: int) -> None:
    draws = random.Random(seed)
    strings = draws.sample(["</answer>", "ab", "é a", "swer>y", "bb"], draws.randint(1, 3))
    stops = StopStrings(strings, decode)
    tokens = [draws.randrange(len(PIECES)) for _ in range(60)]
    expected = first_end(tokens, strings)
    assert stops.end(np.array(tokens), 0) == expected
    one_by_one = next((n for n in range(1, 61) if stops.is_end(np.array(tokens[:n]))), None)
    assert one_by_one == expected
    if expected is not None:
        assert stops.end(np.array(tokens), expected - 1) == expected
        assert stops.end(np.array(tokens[:expected]), draws.randrange(expected)) == expected


def test_bytes_of_one_character_in_tokens_of_their_own_are_enough_tokens() -> None:
    written = np.frombuffer("xé€!".encode(), np.uint8)
    stops = StopStrings(["é€"], lambda tokens_R: bytes(tokens_R.tolist()).decode("utf-8", "replace"))
    assert stops.end(written, 0) == 6
    assert stops.num_tokens == 6


def test_a_stop_string_is_a_finish_reason_stop_without_a_stop_token() -> None:
    stops, sampling = StopStrings(["ab"], decode), Sampling(max_new_tokens=2, stop_token_ids=(1,), stop=("ab",))
    segment = Segment(np.array([0, 1], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
    facts = {"end_ids": (1,), "max_context": 9}
    assert end_of(segment, sampling, 3, stops=stops, **facts) == "end_of_sequence"
    by_text = call_sampling(sampling, (), stop_token_ids=())
    assert end_of(segment, by_text, 3, stops=stops, **facts) == "stop_string"
    assert end_of(segment, by_text, 3, **facts) == "length"
    answer = answer_of(segment, "stop_string", is_trainable=True)
    assert (answer.finish_reason, answer.stop_token, len(answer.segment)) == ("stop", None, 2)
    assert call_sampling(Sampling(stop=("a",), ignore_eos=True), ()).stop == ()


def test_an_answer_that_came_complete_is_not_continued() -> None:
    segment = Segment(np.array([0, 1], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
    asked = {"request_id": 1, "prompt_P": np.array([1]), "sampling": Sampling(), "seed": 1}
    outcome = ended_already(GenerationRequest(prefix=segment, stops=StopStrings(["ab"], decode), **asked))
    assert outcome is not None
    assert outcome.end_reason == "stop"
    assert ended_already(GenerationRequest(prefix=segment, stops=StopStrings(["ba"], decode), **asked)) is None
