"""Checks of requests that every engine makes before it generates."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from rollout.engine.port import EndReason, GenerationOutcome, GenerationRequest


def check_request(request: GenerationRequest, *, context: int, vocab_size: int, adapters: Collection[str] = ()) -> None:
    """Raise UserError if the request does not fit this context (in tokens) or vocabulary, or names another adapter."""
    check_adapter(request.adapter, adapters)
    num_known = len(request.prompt_P) + len(request.prefix)
    if not len(request.prompt_P):
        raise UserError("the prompt is empty", remedy="use a prompt of at least one token")
    if num_known + 1 > context:
        raise UserError(
            f"the prompt and the answer so far have {num_known} tokens, which leaves no room in a context of {context} "
            "tokens",
            remedy="increase rollout.engine.max_context, or remove the row",
        )
    for tokens in (request.prompt_P, request.prefix.tokens_R):
        check_tokens(tokens, vocab_size)
    sampling = request.sampling
    if not sampling.temperature >= 0 or sampling.top_p <= 0 or sampling.top_k < 0:
        raise UserError(
            f"the sampling settings are invalid: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k "
            f"{sampling.top_k}",
            remedy="use a temperature of at least 0, a top_p greater than 0 and a top_k of at least 0",
        )


def check_adapter(name: str, adapters: Collection[str]) -> None:
    """Raise UserError if an engine with these adapters has none of this name; the empty name is the base."""
    if name and name not in adapters:
        known = f"use one of {', '.join(adapters)}" if adapters else "configure this adapter; the engine has none"
        raise UserError(f"the engine has no adapter {name}", remedy=known)


def check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    """Raise UserError if a token is outside the vocabulary."""
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise UserError(
            f"token {outside[0]} is not in the vocabulary of {vocab_size} tokens",
            remedy="use the tokenizer that belongs to the model",
        )


def ended_already(request: GenerationRequest) -> GenerationOutcome | None:
    """The outcome if the prefix is already a complete answer, else None."""
    prefix, sampling = request.prefix, request.sampling
    is_stopped = len(prefix) > 0 and int(prefix.tokens_R[-1]) in sampling.stop_token_ids
    is_stopped |= request.stops is not None and request.stops.is_end(prefix.tokens_R)
    if not is_stopped and len(prefix) < sampling.max_new_tokens:
        return None
    reason: EndReason = "stop" if is_stopped else "length"
    return GenerationOutcome(request_id=request.request_id, segment=Segment.empty(), end_reason=reason)
