"""Requests of any shape: a dialect reads them or refuses them, and never fails."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from agent_policy import ADD, Policy

from areal_like.errors import UserError
from rollout.agent.dialect import BadRequest, Dialect, Reply, call, events, openai_error
from rollout.agent.listener import DIALECTS
from rollout.agent.store import TokenStore
from rollout.chat.calls import schemas_by_name

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"},
        ],
        "tools": [ADD],
        "tool_choice": "auto",
        "max_tokens": 3,
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "n": 1,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "rs_0", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {
                "type": "message",
                "id": "msg_0",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_0_0", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "previous_response_id": "resp_0",
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 3,
        "stream": False,
    },
    "/v1/messages": {
        "model": "m",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "turn-0"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "text", "text": "u"},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 3,
        "stream": False,
    },
    "/inference/v1/generate": {
        "model": "policy", "token_ids": [72, 105, 33], "stream": False, "cache_salt": "x", "features": {},
        "sampling_params": {"max_tokens": 3, "n": 1, "stop": [], "stop_token_ids": [2], "temperature": 0.5},
    },
}  # fmt: skip
ODD = (
    None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", "resp_99999999999999999999", "none", [], [None], [[]], ["x"], {},
    {"type": "text"}, {"role": "assistant"}, {"role": "user", "content": {}}, {"type": "image"}, [{"type": "x"}],
)  # fmt: skip
"""What a request may hold anywhere."""


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def earlier(index: int) -> list[Any]:
    return [{"role": "user", "content": "u"}, {"role": "assistant", "content": str(index)}]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_request_with_odd_values_is_read_or_refused(dialect: Dialect) -> None:
    rng = random.Random(dialect.path)
    policy = Policy()
    store = TokenStore(policy.tokens, stop_marks=("<|im_end|>",))
    refusals, num_read = [], 0
    sound = dialect.read(BODIES[dialect.path], earlier)
    assert sound.tools or sound.token_ids == [72, 105, 33], "the request itself is sound"
    for _ in range(600):
        body = copy.deepcopy(BODIES[dialect.path])
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            container, key = rng.choice(places(body))
            if isinstance(container, dict) and rng.random() < 0.2:
                del container[key]
            else:
                container[key] = copy.deepcopy(rng.choice(ODD))
        try:
            asked = dialect.read(body, earlier)
            schemas_by_name(asked.tools)
            if asked.token_ids is None:
                store.prompt(asked.messages, asked.tools)
            else:
                store.prompt_of_tokens(asked.token_ids)
            num_read += 1
        except BadRequest as refusal:
            refusals.append(refusal)
        except UserError:  # the session refuses it
            pass
    assert min(num_read, len(refusals)) > 50
    assert {refusal.status for refusal in refusals} <= {400, 404}
    assert all(json.dumps(dialect.error(refusal)) for refusal in refusals)


def test_events_of_a_streamed_answer_come_in_the_order_of_each_api() -> None:
    reply = Reply(
        index=3,
        created=1,
        message={"role": "assistant", "content": "Sum.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        finish_reason="tool_calls",
        num_prompt=5,
        prompt_ids=[],
        tokens_R=np.zeros(2, np.int32),
        logprobs_R=np.zeros(2, np.float32),
        token_texts=["a", "b"],
    )
    chat, responses, messages = (
        list(events(dialect.stream(dialect.read(BODIES[dialect.path], earlier)), reply)) for dialect in DIALECTS[:3]
    )
    assert chat[-1] == "data: [DONE]\n\n"
    deltas = [json.loads(one.removeprefix("data: "))["choices"] for one in chat[:-1]]
    assert [list(choices[0]["delta"]) if choices else None for choices in deltas] == [
        ["role", "content"], ["reasoning_content"], ["content"], ["tool_calls"], ["tool_calls"], [], None,
    ]  # fmt: skip
    assert names(responses) == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    (_, begun), (_, ended) = (messages[place].rstrip().split("data: ") for place in (0, -2))
    assert (json.loads(begun)["message"]["usage"]["output_tokens"], json.loads(ended)["usage"]["output_tokens"]) == (
        0,
        2,
    )
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    signed = [*block[:2], *block[1:]]
    assert names(messages) == ["message_start", *signed, *block, *block, "message_delta", "message_stop"]


def names(events: list[str]) -> list[str]:
    """Of events; the name in the data is the same."""
    kinds = []
    for one in events:
        head, data = one.rstrip().split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == head.removeprefix("event: ")
        kinds.append(head.removeprefix("event: "))
    return kinds


def test_text_of_a_user_in_several_blocks_is_one_message_between_results_of_tools() -> None:
    texts = [{"type": "text", "text": text} for text in ("a", "b", "c")]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}
    body = {"messages": [{"role": "user", "content": [*texts[:2], result, texts[2]]}]}
    asked = DIALECTS[2].read(body, earlier)
    assert [(one["role"], one["content"]) for one in asked.messages] == [("user", "ab"), ("tool", "1"), ("user", "c")]


@pytest.mark.parametrize("name", [None, "", 3, ["add"]])
def test_a_call_without_the_name_of_a_tool_is_refused(name: Any) -> None:
    with pytest.raises(BadRequest, match="here needs the name of a tool and its arguments") as refused:
        call("c1", name, "{}", "here")
    assert refused.value.param == "here"


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
def test_the_type_of_an_error_follows_its_status(status: int) -> None:
    kinds = {401: "authentication_error", 500: "server_error", 503: "server_error"}
    error = openai_error(BadRequest("no", status=status))["error"]
    assert error["type"] == kinds.get(status, "invalid_request_error")
