"""The API `POST /inference/v1/generate` of vLLM, for clients that render conversations themselves and send token ids.

The parts that all APIs share are in dialect.py. Images are not supported.

Nothing is rendered or tokenised here: a request that begins with all tokens of an earlier answer continues it, and the
rest are tokens that the client added. An answer ends where the model ends it; `stop_token_ids` of a request are not
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.agent.dialect import (
    AgentRequest,
    BadRequest,
    Earlier,
    EventStream,
    Refused,
    Reply,
    flag,
    max_tokens,
    model,
    openai_error,
    refuse,
)

REFUSED: Refused = {
    "features": ({}, "images are not supported"),
    "content_parts": ([], "images are not supported"),
}
REFUSED_PARAMS: Refused = {
    "n": (1, "send several requests instead"),
    "stop": ([], "only the model can end an answer"),
    "logit_bias": ({}, "training requires the policy's own distribution"),
    "bad_words": ([], "training requires the policy's own distribution"),
    "min_tokens": (0, "only the model can end an answer"),
    "prompt_logprobs": (0, "only the answer has log-probs"),
}


class TokenRequests:
    """See `Dialect`."""

    path = "/inference/v1/generate"

    def read(self, body: Mapping[str, Any], earlier: Earlier) -> AgentRequest:
        """See `Dialect`."""
        refuse(body, REFUSED)
        params = body.get("sampling_params")
        if params is not None and not isinstance(params, Mapping):
            raise BadRequest("sampling_params must be an object", param="sampling_params")
        params = params or {}
        refuse(params, REFUSED_PARAMS)
        if flag(body, "stream"):
            raise BadRequest("stream is not supported here: remove it", param="stream")
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise BadRequest("token_ids must be a list of at least one token id", param="token_ids")
        return AgentRequest(
            model=model(body),
            messages=[],
            tools=[],
            reads_calls=False,
            max_tokens=max_tokens(params, "max_tokens"),
            is_streamed=False,
            token_ids=ids,
            settings=params,
        )

    def answer(self, request: AgentRequest, reply: Reply) -> dict[str, Any]:
        """See `Dialect`."""
        pairs = zip(reply.tokens_R.tolist(), reply.logprobs_R.tolist(), strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
        choice = {
            "index": 0,
            "token_ids": reply.tokens_R.tolist(),
            "finish_reason": reply.finish_reason,
            "logprobs": {"content": content},
        }
        return {"request_id": f"generate-{reply.index}", "choices": [choice]}

    def stream(self, request: AgentRequest) -> EventStream:
        """Never called: `read` refuses a request for a stream."""
        raise AssertionError("a request for a stream was accepted, although this endpoint does not support streams")

    def error(self, refusal: BadRequest) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(refusal)
