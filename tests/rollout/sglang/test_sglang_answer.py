"""Claims about reading the server's events. What comes out is checked against plain lists of tokens and versions."""

from __future__ import annotations

import json

import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import EngineError
from rollout.engine.server.answer import GrowingAnswer, parse_event


def event(tokens, versions, start, *, is_incremental=True, is_last=False, **changed):
    """What a server says after `tokens` were sampled under `versions`, of which `start` were reported before."""
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


class TwoSockets:
    """A scheduler whose outputs and update answers reach the front through two sockets, and an answer that grows."""

    def __init__(self, *, is_incremental: bool):
        self.is_incremental = is_incremental
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.reported = 0
        self.version = 0
        self.answer = GrowingAnswer()
        self.answer.begin_attempt(0)

    def sample(self, count):
        for _ in range(count):
            self.tokens.append(len(self.tokens))
            self.versions.append(self.version)

    def swap(self):
        """Outputs that were sent before it may still wait in the front when its answer is through."""
        self.answer.weights_change()
        self.version += 1

    def deliver(self, count):
        """The front passes on outputs that wait, as one event that bears the name of the weights in use by now."""
        self.take(min(self.reported + count, len(self.tokens)), is_last=False)

    def end(self):
        self.take(len(self.tokens), is_last=True)

    def take(self, end, *, is_last):
        said = event(
            self.tokens[:end], self.versions[:end], self.reported, is_incremental=self.is_incremental, is_last=is_last,
            weight_version=str(self.version),
        )  # fmt: skip
        self.answer.take(said, is_incremental=self.is_incremental)
        self.reported = end

    def check(self):
        shown = self.answer.segment
        assert shown.tokens_R.tolist() == self.tokens[: len(shown)]
        assert shown.versions_R.tolist() == self.versions[: len(shown)]


STEPS = st.lists(st.tuples(st.sampled_from(("sample", "deliver", "swap")), st.integers(1, 5)), max_size=40)


@settings(deadline=None, max_examples=num_examples(300))
@given(steps=STEPS, is_incremental=st.booleans())
def test_no_token_is_shown_with_a_version_that_did_not_sample_it_in_any_order_of_the_sockets(steps, is_incremental):
    world = TwoSockets(is_incremental=is_incremental)
    num_certain = 0
    for what, count in steps:
        if what == "swap":
            world.swap()
        else:
            getattr(world, what)(count)
        world.check()
        if not world.version:
            num_certain = world.reported
        assert len(world.answer) == num_certain, "what one version sampled must be shown at once"
    world.sample(1)
    world.end()
    world.check()
    assert len(world.answer) == len(world.tokens)
    assert world.answer.drop_hidden() == 0


def test_what_an_attempt_got_under_one_version_is_shown_however_many_tokens_an_event_holds():
    answer = GrowingAnswer()
    answer.begin_attempt(2)
    for start, end in ((0, 1), (1, 4), (4, 5)):
        answer.take(event(list(range(end)), [2] * end, start), is_incremental=True)
        assert (len(answer), answer.last_version, answer.last_token) == (end, 2, end - 1)


def test_a_name_that_nobody_announced_hides_everything_that_follows():
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    answer.take(event([4], [1], 0), is_incremental=True)
    answer.take(event([4, 5], [1, 3], 1), is_incremental=True)
    answer.take(event([4, 5, 6], [1, 3, 1], 2), is_incremental=True)
    assert (len(answer), answer.newest_version) == (1, 3)
    answer.take(event([4, 5, 6, 7], [1, 1, 3, 3], 3, is_last=True), is_incremental=True)
    assert answer.segment.versions_R.tolist() == [1, 1, 3, 3]


def test_unconfirmed_tokens_are_dropped_and_the_next_attempt_counts_positions_again():
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    answer.take(event([4, 5], [1, 1], 0), is_incremental=True)
    early = answer.segment
    answer.weights_change()
    answer.take(event([4, 5, 8, 9], [1, 1, 1, 2], 2), is_incremental=True)
    assert (len(answer), answer.newest_version) == (2, 2)
    assert answer.drop_hidden() == 2
    answer.begin_attempt(2)
    assert answer.is_attempt_empty
    answer.take(event([6], [2], 0), is_incremental=True)
    assert (answer.segment.tokens_R.tolist(), answer.segment.versions_R.tolist()) == ([4, 5, 6], [1, 1, 2])
    assert early.tokens_R.tolist() == [4, 5]


def test_spans_that_contradict_what_was_shown_are_an_error():
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    answer.take(event([4], [1], 0), is_incremental=True)
    with pytest.raises(EngineError, match="another client is changing its weights"):
        answer.take(event([4, 5], [2, 2], 1, is_last=True), is_incremental=True)


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
        ({"output_token_logprobs": [[-0.5, 4, None]]}, "sent 2 tokens with 1 log-probs"),
        (
            {"output_token_logprobs": [[-0.5, 4, None], [-0.5, 9, None]]},
            "differ from the token ids that the server sent",
        ),
        ({"completion_tokens": 3}, "the server reports a total of 3 tokens, but sent 2 tokens"),
        (
            {"weight_versions": [{"version": "1", "start": 0, "end": 1}]},
            "reported no weight version for some of the tokens",
        ),
        ({"weight_version": "default"}, "with the weights `default`"),
    ],
)
def test_events_that_contradict_themselves_are_errors(changed, said):
    answer = GrowingAnswer()
    answer.begin_attempt(1)
    with pytest.raises(EngineError, match=said):
        answer.take(event([4, 5], [1, 1], 0, **changed), is_incremental=True)


def test_what_is_no_event_is_an_error():
    with pytest.raises(EngineError, match="invalid event"):
        parse_event(b"<html>")
