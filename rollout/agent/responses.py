"""The API `POST /v1/responses` of OpenAI.

The parts that all APIs share are in dialect.py; conversations for `previous_response_id` are kept in session.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
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
from rollout.agent.store import TURN, Message

Item = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` with which log-probs are requested; other entries have no effect."""
REFUSED: Refused = {
    "background": (False, "wait for the answer"),
    "conversation": (None, "use previous_response_id, or send the whole conversation"),
    "prompt": (None, "send the messages themselves"),
    "top_logprobs": (0, ONLY_SAMPLED),
}


class Responses:
    """See `Dialect`."""

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any], earlier: Earlier) -> AgentRequest:
        """See `Dialect`."""
        refuse(body, REFUSED)
        text = body.get("text")
        refuse_form(text.get("format") if isinstance(text, Mapping) else None, "text.format")
        tools = [_tool(tool) for tool in list_of(body, "tools")]
        instructions = text_of(body.get("instructions"), "instructions")
        first: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        before = _before(body.get("previous_response_id"), earlier)
        return AgentRequest(
            model=model(body),
            messages=end_of([*first, *before, *_messages(body)], "input"),
            tools=tools,
            reads_calls=reads_calls(body, tools),
            max_tokens=max_tokens(body, "max_output_tokens"),
            is_streamed=flag(body, "stream"),
            wants_logprobs=LOGPROBS in _include(body),
            wants_token_ids=flag(body, "return_token_ids"),
            num_instructions=len(first),
        )

    def answer(self, request: AgentRequest, reply: Reply) -> dict[str, Any]:
        """See `Dialect`."""
        given, sampled = reply.num_tokens
        is_cut = reply.finish_reason == "length"
        body = {
            **_begun(request, reply),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(reply),
            "usage": {
                "input_tokens": given,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": given + sampled,
            },
        }
        if request.wants_token_ids:
            body |= {"token_ids": reply.tokens_R.tolist(), "prompt_token_ids": reply.prompt_ids}
        return body

    def stream(self, request: AgentRequest) -> ResponsesStream:
        """See `Dialect`."""
        return ResponsesStream(request)

    def error(self, refusal: BadRequest) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(refusal)


class ResponsesStream:
    """See `EventStream`."""

    def __init__(self, request: AgentRequest) -> None:
        self._request, self._index = request, 0
        self._numbers, self._num_items = itertools.count(), 0
        self._open: TextKind | None = None
        """Kind of the current item."""
        self._text = ""
        """Text of the current item so far."""

    def begin(self, opening: Opening) -> Iterator[str]:
        """See `EventStream`."""
        self._index = opening.index
        begun = _begun(self._request, opening)
        yield self._made("created", response=begun)
        yield self._made("in_progress", response=begun)

    def text(self, kind: TextKind, text: str) -> Iterator[str]:
        """See `EventStream`."""
        if kind != self._open:
            yield from self._closed("completed")
            self._open, self._text = kind, ""
            item = _text_item(kind, self._index, "", "in_progress")
            yield self._made("output_item.added", item={**item, "content": []}, output_index=self._num_items)
            yield self._of_item("content_part.added", item, part=item["content"][0])
        self._text += text
        yield self._of_text("delta", delta=text)

    def end(self, reply: Reply) -> Iterator[str]:
        """See `EventStream`."""
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        yield from self._closed(status, logprobs_of(reply))
        for item in _items(reply):
            if item["type"] == "function_call":
                where = {"output_index": self._num_items}
                self._num_items += 1
                yield self._made("output_item.added", item={**item, "status": "in_progress", "arguments": ""}, **where)
                named = {"item_id": item["id"], **where}
                yield self._made("function_call_arguments.delta", delta=item["arguments"], **named)
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._made("function_call_arguments.done", **done, **named)
                yield self._made("output_item.done", item=item, **where)
        response = Responses().answer(self._request, reply)
        yield self._made(response["status"], response=response)

    def fail(self, refusal: BadRequest) -> Iterator[str]:
        """See `EventStream`."""
        said = {"code": refusal.code, "message": str(refusal), "param": refusal.param or None}
        yield event({"type": "error", "sequence_number": next(self._numbers), **said}, "error")

    def _closed(self, status: str, logprobs: Sequence[Item] = ()) -> Iterator[str]:
        if self._open is None:
            return
        item = _text_item(self._open, self._index, self._text, status, logprobs)
        yield self._of_text("done", logprobs, text=self._text)
        yield self._of_item("content_part.done", item, part=item["content"][0])
        yield self._made("output_item.done", item=item, output_index=self._num_items)
        self._open, self._num_items = None, self._num_items + 1

    def _of_text(self, what: str, logprobs: Sequence[Item] = (), **more: Any) -> str:
        assert self._open is not None
        item = _text_item(self._open, self._index, "", "")
        if self._open == "content":
            return self._of_item(f"output_text.{what}", item, **more, logprobs=list(logprobs))
        return self._of_item(f"reasoning_text.{what}", item, **more)

    def _of_item(self, kind: str, item: Item, **more: Any) -> str:
        return self._made(kind, item_id=item["id"], output_index=self._num_items, content_index=0, **more)

    def _made(self, kind: str, **more: Any) -> str:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(self._numbers), **more}, kind)


def _begun(request: AgentRequest, one: Reply | Opening) -> dict[str, Any]:
    return {
        "id": f"resp_{one.index}", "object": "response", "created_at": one.created, "status": "in_progress",
        "incomplete_details": None, "error": None, "model": request.model, "output": [],
        "instructions": request.messages[0]["content"] if request.num_instructions else None,
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "tool_choice": "auto" if request.reads_calls else "none",
        "parallel_tool_calls": True, "metadata": {}, "usage": None,
    }  # fmt: skip


def _text_item(kind: TextKind, index: int, text: str, status: str, logprobs: Sequence[Item] = ()) -> Item:
    if kind == "reasoning":
        content: list[Item] = [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{index}", "type": "reasoning", "summary": [], "content": content, "status": status}
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}]
    return {"id": f"msg_{index}", "type": "message", "role": "assistant", "content": content, "status": status}


def _items(reply: Reply) -> list[Item]:
    """The output: reasoning, text and tool calls. The last text of a truncated answer is marked as incomplete."""
    message, index = reply.message, reply.index
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    content, items = message["content"], []
    if reasoning := message.get("reasoning_content"):
        items.append(_text_item("reasoning", index, reasoning, "completed" if content else status))
    if content:
        items.append(_text_item("content", index, content, status, logprobs_of(reply)))
    for place, one in enumerate(message.get("tool_calls") or ()):
        function = one["function"]
        names = {"id": f"fc_{index}_{place}", "call_id": one["id"], "name": function["name"]}
        items.append({"type": "function_call", **names, "arguments": function["arguments"], "status": "completed"})
    return items


def _include(body: Mapping[str, Any]) -> Sequence[Any]:
    found = body.get("include")
    if found is not None and not isinstance(found, list):
        raise BadRequest("include must be a list", param="include")
    return found or ()


def _before(response_id: Any, earlier: Earlier) -> list[Message]:
    if response_id is None:
        return []
    named = re.fullmatch(r"resp_(\d{1,9})", str(response_id))
    if named is None:
        raise BadRequest(f"there is no response {response_id}", param="previous_response_id", status=404)
    return earlier(int(named[1]))


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """The input as messages; consecutive items of one answer form one message."""
    if isinstance(body.get("input"), str):
        return [{"role": "user", "content": body["input"]}]
    made: list[Message] = []
    for place, item in enumerate(list_of(body, "input")):
        for message in _of_item(item, f"input[{place}]"):
            last = made[-1] if made else {"role": ""}
            is_same_turn = last.get(TURN, message.get(TURN)) == message.get(TURN, last.get(TURN))
            if last["role"] == message["role"] == "assistant" and is_same_turn:
                made[-1] = _joined(last, message)
            else:
                made.append(message)
    return made


def _of_item(item: Mapping[str, Any], where: str) -> Iterator[Message]:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        output = text_of(item.get("output"), f"{where}.output")
        yield {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output}
        return
    if kind == "message" and item.get("role") not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=where)
    named = re.fullmatch(r"(?:msg|fc|rs)_(\d{1,9})(?:_\d+)?", str(item.get("id") or ""))
    said: Message = {"role": "assistant", "content": "", **({TURN: int(named[1])} if named else {})}
    if kind == "message" and item["role"] != "assistant":
        role = "system" if item["role"] == "developer" else item["role"]
        yield {"role": role, "content": text_of(item.get("content"), f"{where}.content")}
    elif kind == "message":
        yield {**said, "content": text_of(item.get("content"), f"{where}.content")}
    elif kind == "function_call":
        yield {**said, "tool_calls": [call(item.get("call_id"), item.get("name"), item.get("arguments"), where)]}
    elif kind == "reasoning":
        texts = [str(part.get("text") or "") for name in ("content", "summary") for part in list_of(item, name)]
        yield {**said, "reasoning_content": "".join(texts)}
    else:
        raise BadRequest(f"{where}: items of type {kind} are not supported here", param=where)


def _joined(first: Message, second: Message) -> Message:
    made = {**first, **second, "content": first["content"] + second["content"]}
    for key in ("reasoning_content", "tool_calls"):
        if key in first and key in second:
            made[key] = first[key] + second[key]
    return made


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise BadRequest(
            "every tool must be {type: function, name, parameters}: other tools are not supported here", param="tools"
        )
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}
