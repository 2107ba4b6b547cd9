"""Clients that send token ids: what a request continues, what it is answered, what is trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_policy import Policy, asked

PATH = "/inference/v1/generate"


def ids_of(policy: Policy, text: str) -> list[int]:
    return [int(one) for one in policy.tokens.encode(text)]


def test_a_conversation_by_token_ids_is_one_trajectory_with_the_sampled_tokens() -> None:
    policy = Policy("7<|im_end|>", "8<|im_end|>")
    first = ids_of(policy, "3 and 4?")
    answer = ids_of(policy, "7<|im_end|>")
    more = ids_of(policy, "Sure?")
    bodies = [{"token_ids": first, "sampling_params": {"max_tokens": 9}}, {"token_ids": first + answer + more}]
    answers, agent = asked(policy, *bodies, path=PATH)
    (status, body), (_, second) = answers
    (choice,) = body["choices"]
    assert (status, choice["token_ids"], choice["finish_reason"]) == (200, answer, "stop")
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{one}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for one in answer
    ]
    assert body["request_id"] != second["request_id"]
    assert policy.prompts == [first, first + answer + more]
    assert policy.limits == [9, None]
    (trajectory,) = agent.store.trajectories()
    assert policy.sampled(trajectory) == "7<|im_end|>8<|im_end|>"
    assert agent.last_content == "8"


def test_two_continuations_of_one_answer_train_each_sampled_token_once() -> None:
    policy = Policy("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>")
    first, answer = ids_of(policy, "?"), ids_of(policy, "a<|im_end|>")
    prompts = [first, first + answer + [5], first + answer + [6], [9, *first]]
    _, agent = asked(policy, *({"token_ids": one} for one in prompts), path=PATH)
    trajectories = agent.store.trajectories()
    sampled = [policy.sampled(one) for one in trajectories]
    assert sampled == ["d<|im_end|>", "c<|im_end|>", "a<|im_end|>b<|im_end|>"]
    assert trajectories[1].tokens_T[: len(prompts[2])].tolist() == prompts[2]


def test_the_longest_and_then_the_newest_turn_is_continued() -> None:
    policy = Policy("a<|im_end|>", "a<|im_end|>", "b<|im_end|>")
    first, answer = ids_of(policy, "?"), ids_of(policy, "a<|im_end|>")
    _, agent = asked(policy, *({"token_ids": one} for one in (first, first, first + answer)), path=PATH)
    assert [turn.anchor and turn.anchor.index for turn in agent.store.turns] == [None, None, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": []}, "token_ids must be a list"),
        ({"token_ids": "12"}, "token_ids must be a list"),
        ({"token_ids": [True]}, "token_ids must be a list"),
        ({"token_ids": [-1]}, "token id -1 is not in the tokenizer's vocabulary"),
        ({"token_ids": [10**30]}, "token id 1000"),
        ({"token_ids": [1] * 4000}, "the messages have 4000 tokens"),
        ({"stream": True}, "stream is not supported"),
        ({"features": {"image": 1}}, "images are not supported"),
        ({"sampling_params": 3}, "sampling_params must be an object"),
        ({"sampling_params": {"n": 2}}, "n is not supported"),
        ({"sampling_params": {"stop": ["x"]}}, "stop is not supported"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens must be"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(change: dict[str, Any], words: str) -> None:
    policy = Policy("7<|im_end|>")
    ((status, body), (good, _)), agent = asked(policy, {"token_ids": [1], **change}, {"token_ids": [1]}, path=PATH)
    assert (status, good) == (400, 200), body
    assert words in body["error"]["message"]
    assert agent.counts["agent_refused"] == 1


def test_token_ids_end_where_those_of_the_tokenizer_end() -> None:
    policy = Policy()
    last = max(policy.tokenizer.get_vocab().values())
    assert policy.tokens.num_ids == last + 1
    _, agent = asked(policy)
    prompt = agent.store.prompt_of_tokens([last])
    assert (prompt.anchor, prompt.transcript.tokens_T.tolist()) == (None, [last])
    assert prompt.transcript.tokens_T.dtype == np.int32


def test_an_answer_under_way_is_one_however_often_its_retry_comes() -> None:
    policy = Policy("7<|im_end|>")
    body = {"token_ids": [1, 2]}
    ((_, first), (_, again)), _ = asked(policy, body, (body, {"x-stainless-retry-count": "1"}), path=PATH)
    assert first == again
