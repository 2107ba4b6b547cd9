"""The API `POST /v1/messages` of Anthropic.

The parts that all APIs share are in dialect.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.agent.dialect import (
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
    max_tokens,
    model,
    reads_calls,
    refuse,
    text_of,
)
from rollout.agent.store import TURN, Message

Block = dict[str, Any]
REFUSED: Refused = {
    "stop_sequences": ([], "only the model can end an answer"),
    "mcp_servers": ([], "use tools"),
    "container": (None, "use tools"),
    "output_format": (None, "answers cannot be constrained"),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "api_error",
}  # fmt: skip
"""Types of errors by status; the others are `invalid_request_error`."""
SIGNED = "turn-"
"""Prefix of the signature of thinking, which clients send back and which identifies the turn."""


class AnthropicMessages:
    """See `Dialect`."""

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any], earlier: Earlier) -> AgentRequest:
        """See `Dialect`."""
        refuse(body, REFUSED)
        output = body.get("output_config")
        refuse(output if isinstance(output, Mapping) else {}, {"format": (None, "answers cannot be constrained")})
        tools = [_tool(tool) for tool in list_of(body, "tools")]
        system = text_of(body.get("system"), "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for place, message in enumerate(list_of(body, "messages")):
            messages += _messages(message, f"messages[{place}]")
        return AgentRequest(
            model=model(body),
            messages=end_of(messages, "messages"),
            tools=tools,
            reads_calls=reads_calls(body, tools),
            max_tokens=max_tokens(body, "max_tokens"),
            is_streamed=flag(body, "stream"),
            wants_token_ids=flag(body, "return_token_ids"),
        )

    def answer(self, request: AgentRequest, reply: Reply) -> dict[str, Any]:
        """See `Dialect`."""
        body = {
            **_begun(request, reply),
            "content": _blocks(reply),
            "stop_reason": STOP_REASONS[reply.finish_reason],
            "usage": _usage(*reply.num_tokens),
        }
        return {**body, **_token_ids(request, reply)}

    def stream(self, request: AgentRequest) -> MessagesStream:
        """See `Dialect`."""
        return MessagesStream(request)

    def error(self, refusal: BadRequest) -> dict[str, Any]:
        """See `Dialect`."""
        # Agents recognise by this text that they must shorten the conversation: the API has no code for it.
        said = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
        kind = ERRORS.get(refusal.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": f"{said}{refusal}"}}


class MessagesStream:
    """See `EventStream`."""

    def __init__(self, request: AgentRequest) -> None:
        self._request, self._index = request, 0
        self._open: TextKind | None = None
        """Kind of the current block."""
        self._num_blocks = 0

    def begin(self, opening: Opening) -> Iterator[str]:
        """See `EventStream`."""
        self._index = opening.index
        yield _made("message_start", message=_begun(self._request, opening))

    def text(self, kind: TextKind, text: str) -> Iterator[str]:
        """See `EventStream`."""
        is_content = kind == "content"
        if kind != self._open:
            yield from self._closed()
            thinking = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._started({"type": "text", "text": "", "citations": None} if is_content else thinking)
            self._open = kind
        yield self._delta("text_delta", text=text) if is_content else self._delta("thinking_delta", thinking=text)

    def end(self, reply: Reply) -> Iterator[str]:
        """See `EventStream`."""
        yield from self._closed()
        for block in _blocks(reply):
            if block["type"] == "tool_use":
                yield self._started({**block, "input": {}})
                yield self._delta("input_json_delta", partial_json=json.dumps(block["input"]))
                yield self._stopped()
        ended = {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}
        ids = _token_ids(self._request, reply)
        yield _made("message_delta", delta=ended, usage=_usage(*reply.num_tokens), **ids)
        yield _made("message_stop")

    def fail(self, refusal: BadRequest) -> Iterator[str]:
        """See `EventStream`."""
        yield event(AnthropicMessages().error(refusal), "error")

    def _started(self, block: Block) -> str:
        self._num_blocks += 1
        return _made("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, kind: str, **part: str) -> str:
        return _made("content_block_delta", index=self._num_blocks - 1, delta={"type": kind, **part})

    def _stopped(self) -> str:
        return _made("content_block_stop", index=self._num_blocks - 1)

    def _closed(self) -> Iterator[str]:
        if self._open == "reasoning":
            yield self._delta("signature_delta", signature=f"{SIGNED}{self._index}")
        if self._open is not None:
            yield self._stopped()
        self._open = None


def _made(kind: str, **more: Any) -> str:
    return event({"type": kind, **more}, kind)


def _begun(request: AgentRequest, one: Reply | Opening) -> dict[str, Any]:
    return {
        "id": f"msg_{one.index}", "type": "message", "role": "assistant", "model": request.model, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": _usage(one.num_prompt, 0),
    }  # fmt: skip


def _usage(given: int, sampled: int) -> dict[str, int]:
    return {
        "input_tokens": given, "output_tokens": sampled, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip


def _token_ids(request: AgentRequest, reply: Reply) -> dict[str, list[int]]:
    if not request.wants_token_ids:
        return {}
    return {"token_ids": reply.tokens_R.tolist(), "prompt_token_ids": reply.prompt_ids}


def _blocks(reply: Reply) -> list[Block]:
    message, blocks = reply.message, []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": f"{SIGNED}{reply.index}"})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"], "citations": None})
    for one in message.get("tool_calls") or ():
        function = one["function"]
        called = {"id": one["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", **called})
    return blocks


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"{where}.role must be user or assistant", param=where)
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    blocks = list_of(message, "content")
    return [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> Message:
    made: Message = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            made["content"] += text_of([block], where)
        elif kind == "tool_use":
            made.setdefault("tool_calls", []).append(
                call(block.get("id"), block.get("name"), block.get("input"), where)
            )
        elif kind == "thinking":
            made["reasoning_content"] = made.get("reasoning_content", "") + str(block.get("thinking") or "")
            if named := re.fullmatch(rf"{SIGNED}(\d{{1,9}})", str(block.get("signature") or "")):
                made[TURN] = int(named[1])
        else:
            raise BadRequest(f"{where}: blocks of type {kind} are not supported here", param=where)
    return made


def _user(blocks: list[Mapping[str, Any]], where: str) -> list[Message]:
    """Convert a user message: each tool result becomes a separate message, and so does the text between them."""
    made: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = text_of(block.get("content"), f"{where}.content")
            made.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": result})
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += text_of([block], f"{where}.content")
        else:
            made.append({"role": "user", "content": text_of([block], f"{where}.content")})
    return made


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise BadRequest("every tool must be {name, input_schema}: server tools are not supported here", param="tools")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
