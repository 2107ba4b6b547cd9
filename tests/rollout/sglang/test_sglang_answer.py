"""Claims about reading the server's events. What comes out is checked against plain lists of tokens and versions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import EngineError
from rollout.engine.sglang.answer import GrowingAnswer, parse_event


def event(tokens, versions, start, *, is_incremental=True, is_last=False, **changed):
    """What a server says after `tokens` were sampled under `versions`, of which `start` were told before."""
    spans = []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": at, "end": at})
        spans[-1]["end"] = at + 1
    shown = slice(start if is_incremental else 0, None)
    logprobs = [[-0.5, token, None] for token in tokens]
    meta = {
        "weight_version": str(versions[-1]) if versions else "0", "output_token_logprobs": logprobs[shown],
        "finish_reason": {"type": "length"} if is_last else None, "completion_tokens": len(tokens),
        **({"weight_versions": spans} if is_last else {}), **changed,
    }  # fmt: skip
    return parse_event(json.dumps({"output_ids": tokens[shown], "meta_info": meta}).encode())


@settings(deadline=None, max_examples=60)
@given(
    rises=st.lists(st.integers(0, 1), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    is_incremental=st.booleans(),
)
def test_nothing_uncertain_is_ever_shown_and_the_end_shows_everything(rises, sizes, is_incremental):
    versions = np.cumsum(rises).tolist()
    tokens = list(range(len(versions)))
    answer, told = GrowingAnswer(), 0
    answer.begin_attempt(0)
    for size in sizes:
        end = min(told + size, len(tokens))
        said = event(
            tokens[:end], versions[:end], told, is_incremental=is_incremental, is_last=end == len(tokens)
        )  # fmt: skip
        assert answer.take(said, is_incremental=is_incremental) == end - told
        told = end
        shown = answer.segment
        assert shown.tokens_R.tolist() == tokens[: len(shown)]
        assert shown.versions_R.tolist() == versions[: len(shown)]
        assert size > 1 or set(sizes) != {1} or len(shown) == told
        if told == len(tokens):
            break
    assert len(answer) == len(tokens)
    assert answer.num_corrected == 0


def test_one_token_an_event_hides_nothing():
    answer = GrowingAnswer()
    answer.begin_attempt(0)
    for count, version in enumerate((0, 0, 1, 3, 3), start=1):
        answer.take(event(list(range(count)), [version] * count, count - 1), is_incremental=True)
        assert (len(answer), answer.last_version, answer.last_token) == (count, version, count - 1)


def test_hidden_tokens_are_forgotten_by_the_next_attempt_and_positions_count_anew():
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    answer.take(event([4, 5], [1, 1], 0), is_incremental=True)
    early = answer.segment
    answer.take(event([4, 5, 8, 9], [1, 1, 1, 2], 2), is_incremental=True)
    assert len(answer) == 2
    answer.begin_attempt(2)
    assert answer.is_attempt_empty
    answer.take(event([6], [2], 0), is_incremental=True)
    assert (answer.segment.tokens_R.tolist(), answer.segment.versions_R.tolist()) == ([4, 5, 6], [1, 1, 2])
    assert early.tokens_R.tolist() == [4, 5]


def test_spans_overrule_what_was_shown_and_that_is_counted():
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    answer.take(event([4], [1], 0), is_incremental=True)
    answer.take(event([4, 5], [1, 2], 1), is_incremental=True)
    answer.take(event([4, 5, 6], [1, 1, 2], 2, is_last=True), is_incremental=True)
    assert answer.segment.versions_R.tolist() == [1, 1, 2]
    assert answer.num_corrected == 1


def test_a_request_aborted_in_the_queue_repeats_its_last_token_in_vain():
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    answer.take(event([4, 5], [1, 1], 0), is_incremental=True)
    last = event([4, 5], [1, 1], 1, is_last=True, output_token_logprobs=[[-0.5, 4, None], [-0.5, 5, None]])
    assert answer.take(last, is_incremental=True) == 0
    assert answer.segment.tokens_R.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"output_token_logprobs": [[-0.5, 4, None]]}, "sends 2 with 1 log-probs"),
        ({"output_token_logprobs": [[-0.5, 4, None], [-0.5, 9, None]]}, "of other tokens"),
        ({"completion_tokens": 3}, "the server says 3, and sends 2"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "leave out tokens"),
        ({"weight_version": "default"}, "weights named `default`"),
    ],
)
def test_events_that_contradict_themselves_are_errors(changed, said):
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    with pytest.raises(EngineError, match=said):
        answer.take(event([4, 5], [1, 1], 0, **changed), is_incremental=True)


def test_what_is_no_event_is_an_error():
    with pytest.raises(EngineError, match="no event"):
        parse_event(b"<html>")
