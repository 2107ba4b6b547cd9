"""Reads the replies of OpenAI-compatible endpoints: chat completions, and completions of token ids.

Errors are RequestRefused: a reply of another form would have it again.

Shape legend: P tokens of a prompt, R tokens after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_like.external.errors import RequestRefused

CHAT, COMPLETIONS = "/chat/completions", "/completions"


class ReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message; None if it only called tools or reasoned."""

    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of a chat completion's choices."""

    message: ReplyMessage
    finish_reason: str | None = None


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a chat completion that is used."""

    choices: list[ChatChoice]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of the sampled tokens."""

    token_logprobs: list[float | None] | None = None


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of a completion's choices, with the fields that vLLM adds."""

    token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TokenReply(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a completion that is used."""

    choices: list[TokenChoice]


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a reply that tells an error from an answer."""

    choices: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


_outlines = msgspec.json.Decoder(Outline)
_NOTHING = (b"", b"null", b"[]")


def error_in(reply: bytes) -> bool:
    """Whether a reply has `error` and no `choices`. Gateways send this with status 200 if their server fails."""
    try:
        found = _outlines.decode(reply)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return bytes(found.error) not in _NOTHING and bytes(found.choices) in _NOTHING


def chat_choice(reply: Any, shown_url: str) -> ChatChoice:
    """The first choice of a chat completion. Raises RequestRefused."""
    return _first(reply, ChatReply, "a chat completion", shown_url)


def token_choice(reply: Any, shown_url: str) -> TokenChoice:
    """The first choice of a completion. Raises RequestRefused."""
    return _first(reply, TokenReply, "a completion", shown_url)


def _first(reply: Any, kind: Any, name: str, shown_url: str) -> Any:
    try:
        found = msgspec.convert(reply, kind)
    except msgspec.MsgspecError as error:
        raise RequestRefused(f"{shown_url} sent a reply that is not {name} ({error})") from error
    if not found.choices:
        raise RequestRefused(f"the reply of {shown_url} contains no choices")
    return found.choices[0]


def sampled_tokens(choice: TokenChoice, shown_url: str) -> tuple[list[int], list[float]]:
    """Token ids [R] and log-probs [R] of a sampled answer. Raises RequestRefused if the endpoint returns none."""
    ids, said = choice.token_ids, choice.logprobs
    logprobs = said.token_logprobs if said is not None else None
    if ids is None or logprobs is None:
        what = "the ids of the sampled tokens" if ids is None else "log-probs of the sampled tokens"
        raise RequestRefused(
            f"{shown_url} does not return {what}; `api: tokens` requires a server that does, such as vLLM"
        )
    if len(ids) != len(logprobs) or not all(one is not None and math.isfinite(one) for one in logprobs):
        raise RequestRefused(f"{shown_url} did not return one finite log-prob for each of its {len(ids)} tokens")
    return ids, [float(one) for one in logprobs if one is not None]


def prompt_logprobs(choice: TokenChoice, tokens_T: Sequence[int], start: int, shown_url: str) -> list[float]:
    """Log-probs [T - start] of the tokens of a prompt from `start` on, each given those before it.

    Args:
        choice: reply to a request with `prompt_logprobs`.
        tokens_T: the prompt.
        start: at least 1.
        shown_url: the endpoint, for errors.

    Raises:
        RequestRefused: the endpoint does not return them.
    """
    rows = choice.prompt_logprobs
    if rows is None:
        raise RequestRefused(f"{shown_url} does not return log-probs of prompt tokens (`prompt_logprobs`)")
    if len(rows) != len(tokens_T):
        raise RequestRefused(f"{shown_url} returned log-probs of {len(rows)} tokens for a prompt of {len(tokens_T)}")
    found = []
    for token, row in zip(tokens_T[start:], rows[start:], strict=True):
        entry = (row or {}).get(str(token))
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestRefused(f"{shown_url} returned no log-prob of token {token} of the prompt")
        found.append(float(value))
    return found
