"""The dialect `POST /v1/chat/completions` of OpenAI: requests read and answers written, as plain functions.

Owns: the form of requests, answers, streamed events and errors. Refuses: HTTP, tokens, generating.

What the policy samples with is the run's: `temperature`, `top_p`, `seed` and penalties of a request are not used, since
training needs the distribution that was configured. What would change the answer itself is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.agent.store import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
REFUSED = {
    "n": (1, "ask several times instead"),
    "best_of": (1, "ask several times instead"),
    "logit_bias": ({}, "the policy's distribution is what is trained"),
    "stop": ([], "an answer ends where the model ends it"),
    "functions": ([], "use tools"),
    "function_call": ("auto", "use tools"),
    "audio": ({}, "answers are text"),
}
"""Settings that would change the answer, the value that does not, and what to do."""
TEXT_PARTS = ("text", "input_text", "output_text")


class BadRequest(Exception):
    """A request that is refused; `status` and `code` are what the client gets."""

    def __init__(self, message: str, *, param: str = "", code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read errors."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param or None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that was read.

    messages: with text contents. tools: as chat templates take them; empty with `tool_choice: none`. max_tokens: of the
    answer; None: as the run has it. wants_*: what the answer shall hold besides the text.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    is_streamed: bool
    wants_usage: bool
    wants_logprobs: bool
    wants_token_ids: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, for a client. message: as of `Message`. token_texts, token_ids, logprobs: of the sampled tokens."""

    index: int
    created: int
    message: Message
    finish_reason: str
    prompt_ids: list[int]
    token_ids: list[int]
    token_texts: list[str]
    logprobs: list[float]

    @property
    def usage(self) -> dict[str, int]:
        given, sampled = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def read_request(body: Any) -> ChatRequest:
    """Read a request. Raises BadRequest saying which part cannot be used, and what to do."""
    if not isinstance(body, Mapping):
        raise BadRequest("the request is not a JSON object")
    for name, (harmless, remedy) in REFUSED.items():
        if body.get(name) is not None and body[name] != harmless:
            raise BadRequest(f"{name} is not supported here: {remedy}", param=name)
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        raise BadRequest("response_format must be text: answers are not constrained", param="response_format")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadRequest("tool_choice must be auto or none: the policy decides what it calls", param="tool_choice")
    stream_options = body.get("stream_options")
    return ChatRequest(
        model=str(body.get("model") or "policy"),
        messages=_messages(body.get("messages")),
        tools=[] if choice == "none" else _tools(body.get("tools")),
        max_tokens=_max_tokens(body),
        is_streamed=bool(body.get("stream")),
        wants_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
        wants_logprobs=bool(body.get("logprobs")),
        wants_token_ids=bool(body.get("return_token_ids")),
    )


def answer_body(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"refusal": None, **reply.message, "content": reply.message["content"] or _no_content(reply)},
        "finish_reason": reply.finish_reason,
        "logprobs": _logprobs(reply) if request.wants_logprobs else None,
    }
    body = {**_head(request, reply, "chat.completion"), "choices": [choice], "usage": reply.usage}
    if request.wants_token_ids:  # where vLLM has them, which is where token-aware clients look
        choice["token_ids"] = reply.token_ids
        body["prompt_token_ids"] = reply.prompt_ids
    return body


def answer_events(request: ChatRequest, reply: Reply) -> Iterator[str]:
    """The data of the events of a streamed answer, in order. The whole answer is sampled before the first one."""
    head = _head(request, reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None, **more}
        return json.dumps({**head, "choices": [choice]})

    logprobs = {"logprobs": _logprobs(reply)} if request.wants_logprobs else {}
    token_ids = {"token_ids": reply.token_ids} if request.wants_token_ids else {}
    yield chunk({"role": "assistant", "content": ""})
    if reasoning := reply.message.get("reasoning_content"):
        yield chunk({"reasoning_content": reasoning})
    if reply.message["content"]:
        yield chunk({"content": reply.message["content"]})
    for index, call in enumerate(reply.message.get("tool_calls") or ()):
        function = call["function"]
        begun = {"index": index, "id": call["id"], "type": "function"}
        yield chunk({"tool_calls": [{**begun, "function": {"name": function["name"], "arguments": ""}}]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
    yield chunk({}, reply.finish_reason, **logprobs, **token_ids)
    if request.wants_usage:
        yield json.dumps({**head, "choices": [], "usage": reply.usage})
    yield "[DONE]"


def _no_content(reply: Reply) -> str | None:
    """What stands for no text: None next to calls, as at OpenAI."""
    return None if reply.message.get("tool_calls") else ""


def _head(request: ChatRequest, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.index}", "object": kind, "created": reply.created, "model": request.model}


def _logprobs(reply: Reply) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, logprob in zip(reply.token_texts, reply.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := body.get(name)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequest(f"{name} must be a whole number of at least 1", param=name)
            return value
    return None


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    made = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if made[-1]["role"] == "assistant":
        raise BadRequest("the last message must not be the assistant's: it is what is asked for", param="messages")
    return made


def _message(message: Any, where: str) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=where)
    made: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{where}.content"),
    }
    if role == "tool":
        made |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)}
    if role == "assistant" and message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise BadRequest(f"{where}.tool_calls must be a list", param=where)
        made["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in message["tool_calls"]]
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        made["reasoning_content"] = message["reasoning_content"]
    return made


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of parts", param=where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where} has a part that is not text: the policy reads text only", param=where)
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} needs function.name and function.arguments", param=where)
    arguments = function.get("arguments", "{}")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("every tool must be {type: function, function: {name, parameters}}", param="tools")
    return [dict(tool) for tool in tools]
