"""The API `POST /v1/chat/completions` of OpenAI.

The parts that all APIs share are in dialect.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout.agent.dialect import (
    ONLY_SAMPLED,
    AgentRequest,
    BadRequest,
    Earlier,
    Opening,
    Refused,
    Reply,
    TextKind,
    call,
    end_of,
    event,
    flag,
    list_of,
    logprobs_of,
    max_tokens,
    model,
    openai_error,
    reads_calls,
    refuse,
    refuse_form,
    text_of,
)
from rollout.agent.store import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
REFUSED: Refused = {
    "n": (1, "send several requests instead"),
    "best_of": (1, "send several requests instead"),
    "logit_bias": ({}, "training requires the policy's own distribution"),
    "stop": ([], "only the model can end an answer"),
    "functions": ([], "use tools"),
    "function_call": ("auto", "use tools"),
    "audio": ({}, "answers are always text"),
    "top_logprobs": (0, ONLY_SAMPLED),
}


class ChatCompletions:
    """See `Dialect`."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any], earlier: Earlier) -> AgentRequest:
        """See `Dialect`."""
        refuse(body, REFUSED)
        refuse_form(body.get("response_format"), "response_format")
        tools = _tools(list_of(body, "tools"))
        stream_options = body.get("stream_options")
        messages = [_message(one, f"messages[{place}]") for place, one in enumerate(list_of(body, "messages"))]
        return AgentRequest(
            model=model(body),
            messages=end_of(messages, "messages"),
            tools=tools,
            reads_calls=reads_calls(body, tools),
            max_tokens=max_tokens(body, "max_completion_tokens", "max_tokens"),
            is_streamed=flag(body, "stream"),
            wants_usage=isinstance(stream_options, Mapping) and flag(stream_options, "include_usage"),
            wants_logprobs=flag(body, "logprobs"),
            wants_token_ids=flag(body, "return_token_ids"),
        )

    def answer(self, request: AgentRequest, reply: Reply) -> dict[str, Any]:
        """See `Dialect`."""
        message = reply.message
        content = message["content"] or (
            None if message.get("tool_calls") else ""
        )  # None with tool calls, as in OpenAI's API
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"refusal": None, **message, "content": content},
            "finish_reason": reply.finish_reason,
            "logprobs": _logprobs(reply) if request.wants_logprobs else None,
        }
        body = {**_head(request, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
        if request.wants_token_ids:  # in the same place as in vLLM, where clients expect them
            choice["token_ids"] = reply.tokens_R.tolist()
            body["prompt_token_ids"] = reply.prompt_ids
        return body

    def stream(self, request: AgentRequest) -> ChatStream:
        """See `Dialect`."""
        return ChatStream(request)

    def error(self, refusal: BadRequest) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(refusal)


class ChatStream:
    """See `EventStream`."""

    def __init__(self, request: AgentRequest) -> None:
        self._request, self._head = request, dict[str, Any]()

    def begin(self, opening: Opening) -> Iterator[str]:
        """See `EventStream`."""
        self._head = _head(self._request, opening, "chat.completion.chunk")
        prompt_ids = {"prompt_token_ids": opening.prompt_ids} if self._request.wants_token_ids else {}
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        yield event({**self._head, "choices": [choice], **prompt_ids})  # in the same place as in vLLM

    def text(self, kind: TextKind, text: str) -> Iterator[str]:
        """See `EventStream`."""
        yield self._chunk({"content" if kind == "content" else "reasoning_content": text})

    def end(self, reply: Reply) -> Iterator[str]:
        """See `EventStream`."""
        logprobs = {"logprobs": _logprobs(reply)} if self._request.wants_logprobs else {}
        token_ids = {"token_ids": reply.tokens_R.tolist()} if self._request.wants_token_ids else {}
        for index, made in enumerate(reply.message.get("tool_calls") or ()):
            function = made["function"]
            begun = {"index": index, "id": made["id"], "type": "function"}
            yield self._chunk({"tool_calls": [{**begun, "function": {"name": function["name"], "arguments": ""}}]})
            yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
        yield self._chunk({}, reply.finish_reason, **logprobs, **token_ids)
        if self._request.wants_usage:
            yield event({**self._head, "choices": [], "usage": _usage(reply)})
        yield event("[DONE]")

    def fail(self, refusal: BadRequest) -> Iterator[str]:
        """See `EventStream`."""
        yield event(openai_error(refusal))

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None, **more}
        return event({**self._head, "choices": [choice]})


def _head(request: AgentRequest, one: Reply | Opening, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{one.index}", "object": kind, "created": one.created, "model": request.model}


def _usage(reply: Reply) -> dict[str, int]:
    given, sampled = reply.num_tokens
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def _logprobs(reply: Reply) -> dict[str, Any]:
    return {"content": logprobs_of(reply), "refusal": None}


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=where)
    made: Message = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), f"{where}.content"),
    }
    if role == "tool":
        made |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)}
    if role == "assistant" and message.get("tool_calls"):
        made["tool_calls"] = [_call(one, f"{where}.tool_calls") for one in list_of(message, "tool_calls")]
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        made["reasoning_content"] = message["reasoning_content"]
    return made


def _call(made: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = made.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where} needs function.name and function.arguments", param=where)
    return call(made.get("id"), function.get("name"), function.get("arguments", "{}"), where)


def _tools(tools: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for tool in tools:
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("every tool must be {type: function, function: {name, parameters}}", param="tools")
    return [dict(tool) for tool in tools]
