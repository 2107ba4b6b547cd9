"""Replies of endpoints: what is read of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.external.chat import chat_choice, prompt_logprobs, sampled_tokens, token_choice
from areal_like.external.errors import RequestRefused

ROWS = [None, {"7": {"logprob": -1.5}, "3": {"logprob": -0.1}}, {"9": {"logprob": -2, "decoded_token": "x"}}]


def tokens_of(**choice: Any) -> Any:
    return token_choice({"choices": [choice]}, "here")


@pytest.mark.parametrize("reply", [[], {}, {"choices": []}, {"choices": [{"text": "x"}]}, {"choices": 3}, "text", None])
def test_what_is_no_chat_completion_is_refused(reply: Any) -> None:
    with pytest.raises(RequestRefused, match=r"here (sent a reply that is not a chat completion|contains no choices)"):
        chat_choice(reply, "here")


def test_log_probs_of_given_tokens_are_those_of_the_tokens_and_not_of_likelier_ones() -> None:
    assert prompt_logprobs(tokens_of(prompt_logprobs=ROWS), [5, 7, 9], 1, "here") == [-1.5, -2.0]
    assert prompt_logprobs(tokens_of(prompt_logprobs=ROWS), [5, 7, 9], 2, "here") == [-2.0]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({}, "does not return log-probs of prompt tokens"),
        ({"prompt_logprobs": ROWS[:2]}, "log-probs of 2 tokens for a prompt of 3"),
        ({"prompt_logprobs": [None, {"3": {"logprob": -1}}, {}]}, "no log-prob of token 7"),
        ({"prompt_logprobs": [None, {"7": {"logprob": True}}, {}]}, "no log-prob of token 7"),
        ({"prompt_logprobs": [None, None, None]}, "no log-prob of token 7"),
    ],
)
def test_an_endpoint_without_them_is_refused_with_a_sentence(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        prompt_logprobs(tokens_of(**choice), [5, 7, 9], 1, "here")


def test_sampled_tokens_come_with_their_log_probs() -> None:
    choice = tokens_of(token_ids=[4, 2], logprobs={"token_logprobs": [-0.5, -1]}, finish_reason="stop")
    assert sampled_tokens(choice, "here") == ([4, 2], [-0.5, -1.0])


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"logprobs": {"token_logprobs": [-1.0]}}, "the ids of the sampled tokens"),
        ({"token_ids": [1]}, "log-probs of the sampled tokens"),
        ({"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}, "one finite log-prob for each of its 2 tokens"),
        ({"token_ids": [1], "logprobs": {"token_logprobs": [None]}}, "one finite log-prob for each of its 1 tokens"),
    ],
)
def test_an_answer_without_ids_or_log_probs_is_refused(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        sampled_tokens(tokens_of(**choice), "here")
