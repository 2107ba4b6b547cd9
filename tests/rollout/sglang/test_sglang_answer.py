"""Claims about reading the server's events. Spans and increments are checked against a plain list of tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import EngineError
from rollout.engine.sglang.answer import GrowingAnswer, parse_event


def event(tokens, versions, start, *, is_incremental):
    """What a server says after `tokens` were sampled under `versions`, of which `start` were told before."""
    spans = []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": at, "end": at})
        spans[-1]["end"] = at + 1
    shown = slice(start if is_incremental else 0, None)
    logprobs = [[-0.5, token, None] for token in tokens]
    meta = {"weight_versions": spans, "output_token_logprobs": logprobs[shown], "finish_reason": None}
    return parse_event(json.dumps({"output_ids": tokens[shown], "meta_info": meta}).encode())


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=12),
    is_incremental=st.booleans(),
)
def test_events_add_up_to_the_answer_with_its_versions(steps, is_incremental):
    answer, tokens, versions, version = GrowingAnswer(), [], [], 0
    answer.begin_attempt()
    for rise, count in steps:
        version += rise
        start = len(tokens)
        tokens += range(start, start + count)
        versions += [version] * count
        assert (
            answer.take(event(tokens, versions, start, is_incremental=is_incremental), is_incremental=is_incremental)
            == count
        )
    assert answer.segment.tokens_R.tolist() == tokens
    assert answer.segment.versions_R.tolist() == versions
    assert answer.last_version == (versions[-1] if versions else -1)


def test_positions_of_a_later_attempt_count_from_its_own_start():
    answer = GrowingAnswer()
    answer.begin_attempt()
    answer.take(event([4, 5], [1, 1], 0, is_incremental=True), is_incremental=True)
    early = answer.segment
    answer.begin_attempt()
    assert answer.is_attempt_empty
    answer.take(event([6], [2], 0, is_incremental=True), is_incremental=True)
    assert (answer.segment.tokens_R.tolist(), answer.segment.versions_R.tolist()) == ([4, 5, 6], [1, 1, 2])
    assert early.tokens_R.tolist() == [4, 5]
    assert answer.segment.logprobs_R.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_token_logprobs": [[-0.5, 4, None]]}, "2 tokens with 1 log-probs"),
        ({"output_token_logprobs": [[-0.5, 4, None], [-0.5, 9, None]]}, "of other tokens"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "leave out tokens"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "weights named `default`"),
    ],
)
def test_events_that_contradict_themselves_are_errors(change, said):
    good = event([4, 5], [1, 1], 0, is_incremental=True)
    meta = {
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "output_token_logprobs": [[-0.5, 4, None], [-0.5, 5, None]],
    }
    bad = parse_event(json.dumps({"output_ids": list(good.output_ids), "meta_info": {**meta, **change}}).encode())
    answer = GrowingAnswer()
    answer.begin_attempt()
    with pytest.raises(EngineError, match=said):
        answer.take(bad, is_incremental=True)


def test_what_is_no_event_is_an_error():
    with pytest.raises(EngineError, match="no event"):
        parse_event(b"<html>")
