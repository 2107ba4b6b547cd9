"""How a client of each API sends its conversation and reads answers, for benchmarks/transcripts.py.

A conversation is a list of messages in the form of chat completions. Those of the assistant also have the number of the
answer (ANSWER), and what the API returned for it (GIVEN). A client writes them again from that, as clients do: without
reasoning or ids, with stripped texts, and with the arguments of calls in another order and with other spaces.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.agent.anthropic_messages import AnthropicMessages
from rollout.agent.chat_completions import ChatCompletions
from rollout.agent.dialect import Dialect
from rollout.agent.responses import Responses

ANSWER, GIVEN = "answer", "given"
MAX_TOKENS = 1 << 20
Row = dict[str, Any]


class AgentClient:
    """Base class. `dice` decides how a message is written again."""

    name: str
    dialect: Dialect

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def body(self, messages: Sequence[Row], tools: Sequence[Row]) -> Row:
        """A request, without its settings. `tools`: name, description and parameters of each."""
        raise NotImplementedError

    def message(self, answer: Row) -> Row:
        """The message of an answer, with GIVEN."""
        raise NotImplementedError

    def _is(self, share: float) -> bool:
        return self._dice.random() < share

    def _text(self, text: str) -> str:
        return text.strip() if self._is(0.3) else text

    def _ordered(self, given: Mapping[str, Any]) -> Row:
        return {key: given[key] for key in sorted(given, reverse=self._is(0.5))}

    def _arguments(self, written: str) -> str:
        return json.dumps(self._ordered(json.loads(written)), indent=self._dice.choice([None, 1]))


class ChatClient(AgentClient):
    """See `AgentClient`."""

    name, dialect = "chat", ChatCompletions()

    def body(self, messages: Sequence[Row], tools: Sequence[Row]) -> Row:
        """See `AgentClient`."""
        offered = [{"type": "function", "function": tool} for tool in tools]
        return {"messages": [self._written(message) for message in messages], "tools": offered}

    def message(self, answer: Row) -> Row:
        """See `AgentClient`."""
        said = {key: value for key, value in answer["choices"][0]["message"].items() if value is not None}
        return {**said, GIVEN: said}

    def _written(self, message: Row) -> Row:
        if message["role"] != "assistant":
            return message
        made = dict(message[GIVEN])
        if self._is(0.5):
            made.pop("reasoning_content", None)
        made["content"] = self._text(made.get("content") or "")
        if self._is(0.3):
            made["content"] = made["content"] or None
        if made.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in made["tool_calls"]]
        return made

    def _call(self, call: Row) -> Row:
        function = call["function"]
        return {**call, "function": {**function, "arguments": self._arguments(function["arguments"])}}


class ResponsesClient(AgentClient):
    """See `AgentClient`. Some requests name the earlier response instead of repeating the conversation."""

    name, dialect = "responses", Responses()

    def body(self, messages: Sequence[Row], tools: Sequence[Row]) -> Row:
        """See `AgentClient`."""
        offered = [{"type": "function", **tool} for tool in tools]
        body: Row = {"tools": offered}
        if messages[0]["role"] == "system":
            body["instructions"] = messages[0]["content"]
            messages = messages[1:]
        last = max((at for at, one in enumerate(messages) if ANSWER in one), default=None)
        if last is not None and self._is(0.3):
            body["previous_response_id"] = f"resp_{messages[last][ANSWER]}"
            messages = messages[last + 1 :]
        return {**body, "input": [item for message in messages for item in self._items(message)]}

    def message(self, answer: Row) -> Row:
        """See `AgentClient`."""
        made: Row = {"role": "assistant", "content": "", GIVEN: answer["output"]}
        for item in answer["output"]:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                made.setdefault("tool_calls", []).append(call)
            else:
                made["content" if item["type"] == "message" else "reasoning_content"] = item["content"][0]["text"]
        return made

    def _items(self, message: Row) -> list[Row]:
        if message["role"] == "tool":
            called = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            return [{**called, "output": message["content"]}]
        if message["role"] != "assistant":
            return [message]
        has_reasoning, has_ids = self._is(0.5), self._is(0.7)
        items = [
            {key: value for key, value in self._item(item).items() if has_ids or key != "id"}
            for item in message[GIVEN]
            if has_reasoning or item["type"] != "reasoning"
        ]
        return items or [{"role": "assistant", "content": ""}]

    def _item(self, item: Row) -> Row:
        if item["type"] == "function_call":
            return {**item, "arguments": self._arguments(item["arguments"])}
        if item["type"] == "message":
            (part,) = item["content"]
            return {**item, "content": [{**part, "text": self._text(part["text"])}]}
        return item


class MessagesClient(AgentClient):
    """See `AgentClient`."""

    name, dialect = "messages", AnthropicMessages()

    def body(self, messages: Sequence[Row], tools: Sequence[Row]) -> Row:
        """See `AgentClient`."""
        offered = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in tools
        ]
        body: Row = {"tools": offered, "max_tokens": MAX_TOKENS}
        if messages[0]["role"] == "system":
            body["system"] = messages[0]["content"]
            messages = messages[1:]
        written: list[Row] = []
        for message in messages:
            if message["role"] != "tool":
                written.append(self._written(message))
                continue
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if written and isinstance(written[-1]["content"], list) and written[-1]["role"] == "user":
                written[-1]["content"].append(result)  # results of one turn are one message
            else:
                written.append({"role": "user", "content": [result]})
        return {**body, "messages": written}

    def message(self, answer: Row) -> Row:
        """See `AgentClient`."""
        made: Row = {"role": "assistant", "content": "", GIVEN: answer["content"]}
        for block in answer["content"]:
            if block["type"] == "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                call = {"id": block["id"], "type": "function", "function": function}
                made.setdefault("tool_calls", []).append(call)
            elif block["type"] == "text":
                made["content"] = block["text"]
            else:
                made["reasoning_content"] = block["thinking"]
        return made

    def _written(self, message: Row) -> Row:
        if message["role"] != "assistant":
            return message
        has_thinking = self._is(0.5)
        kept = [block for block in message[GIVEN] if has_thinking or block["type"] != "thinking"]
        return {"role": "assistant", "content": [self._block(block) for block in kept]}

    def _block(self, block: Row) -> Row:
        if block["type"] == "tool_use":
            return {**block, "input": self._ordered(block["input"])}
        return {**block, "text": self._text(block["text"])} if block["type"] == "text" else block


CLIENTS: tuple[type[AgentClient], ...] = (ChatClient, ResponsesClient, MessagesClient)
