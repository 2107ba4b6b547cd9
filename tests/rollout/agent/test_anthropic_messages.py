"""The dialect of Anthropic as plain functions: what a request means, and every part of an answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollout.agent.anthropic_messages import AnthropicMessages
from rollout.agent.dialect import AgentRequest, BadRequest, Reply, events
from rollout.agent.store import TURN, Message

USER = {"role": "user", "content": "3 and 4?"}
ADD = {"name": "add", "description": "d", "input_schema": {"type": "object"}}
ADD_FOR_TEMPLATE = {"name": "add", "description": "d", "parameters": {"type": "object"}}
CALLS: list[dict[str, Any]] = [
    {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}},
    {"id": "c1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
]
DIALECT = AnthropicMessages()


def no_earlier(_: int) -> Any:
    raise AssertionError("each request holds its whole conversation")


def read(**body: Any) -> AgentRequest:
    return DIALECT.read({"messages": [USER], **body}, no_earlier)


def messages_of(*messages: Any) -> list[Message]:
    return read(messages=[*messages, USER]).messages[:-1]


def reply_of(message: dict[str, Any], finish_reason: str = "stop") -> Reply:
    return Reply(
        index=3, created=1700, message={"role": "assistant", **message}, finish_reason=finish_reason,
        num_prompt=5, prompt_ids=[1, 2], tokens_R=np.array([7, 9], np.int32), token_texts=[],
        logprobs_R=np.array([-0.5, -0.25], np.float32),
    )  # fmt: skip


# ---------------------------------------------------------------- requests


def test_request_with_messages_alone_has_the_settings_of_the_run() -> None:
    assert read() == AgentRequest(
        model="policy", messages=[USER], tools=[], reads_calls=False, max_tokens=None, is_streamed=False,
        wants_usage=False, wants_logprobs=False, wants_token_ids=False, num_instructions=0,
    )  # fmt: skip


def test_each_setting_of_a_request_is_read() -> None:
    made = read(model="m", system="s", tools=[ADD], max_tokens=1, stream=True, return_token_ids=True)
    assert made == AgentRequest(
        model="m", messages=[{"role": "system", "content": "s"}, USER], is_streamed=True, wants_token_ids=True,
        tools=[{"type": "function", "function": ADD_FOR_TEMPLATE}], reads_calls=True, max_tokens=1,
    )  # fmt: skip


@pytest.mark.parametrize("system", [None, "", []])
def test_system_without_text_is_no_message(system: Any) -> None:
    assert read(system=system).messages == [USER]


def test_system_in_blocks_is_joined() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert read(system=blocks).messages[0] == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("stop_sequences", ["x"], "only the model can end an answer"),
        ("mcp_servers", [{}], "use tools"),
        ("container", "x", "use tools"),
        ("output_format", {"type": "json_schema"}, "answers cannot be constrained"),
        ("output_config", {"format": {"type": "json_schema"}}, "answers cannot be constrained"),
    ],
)
def test_setting_that_would_change_the_answer_is_refused_with_a_remedy(name: str, value: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(**{name: value})
    param = "format" if name == "output_config" else name
    assert str(refused.value) == f"{param} is not supported here: {said}"
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_the_same_settings_with_values_that_change_nothing_are_taken() -> None:
    harmless = {"stop_sequences": [], "mcp_servers": [], "output_config": {"effort": "low"}, "temperature": 0.0}
    assert read(**harmless) == read(container=None, output_format=None, output_config="x") == read()


def test_tools_are_written_for_the_chat_template() -> None:
    bare, custom, empty = {"name": "a"}, {"type": "custom", "name": "b"}, {"name": "c", "description": ""}
    assert [tool["function"] for tool in read(tools=[ADD, bare, custom, empty]).tools] == [
        ADD_FOR_TEMPLATE, *({"name": name, "parameters": {}} for name in "abc"),
    ]  # fmt: skip


@pytest.mark.parametrize("tool", [{"type": "web_search_20250305", "name": "web_search"}, {}, {"name": 3}])
def test_tool_that_does_not_run_here_is_refused(tool: Any) -> None:
    with pytest.raises(BadRequest, match="server tools are not supported here") as refused:
        read(tools=[ADD, tool])
    assert refused.value.param == "tools"


@pytest.mark.parametrize(("choice", "reads"), [(None, True), ({"type": "auto"}, True), ({"type": "none"}, False)])
def test_tools_are_offered_unless_the_choice_is_none(choice: Any, reads: bool) -> None:
    assert read(tools=[ADD], tool_choice=choice).reads_calls == reads
    assert not read(tool_choice=choice).reads_calls, "there is nothing to call"


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize(("content", "text"), [("a", "a"), ("", ""), (None, "")])
def test_text_is_one_message(role: str, content: Any, text: str) -> None:
    assert messages_of({"role": role, "content": content}) == [{"role": role, "content": text}]


def test_blocks_of_the_assistant_are_one_message_and_thinking_names_its_turn() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "thinking", "thinking": ", so.", "signature": "turn-12"},
        {"type": "text", "text": "Su"},
        {"type": "text", "text": "m.", "citations": None},
        {"type": "tool_use", "id": "c0", "name": "add", "input": {"x": 3}},
        {"type": "tool_use", "id": "c1", "name": "sub"},
    ]
    assert messages_of({"role": "assistant", "content": blocks}) == [
        {"role": "assistant", "content": "Sum.", "reasoning_content": "Hm, so.", TURN: 12, "tool_calls": CALLS}
    ]


@pytest.mark.parametrize("signature", [None, "", "turn-", "turn-x", "turn-1234567890", "turn-1 ", "xturn-1", 3])
def test_thinking_that_was_signed_elsewhere_names_no_turn(signature: Any) -> None:
    blocks = [{"type": "thinking", "thinking": None, "signature": signature}]
    assert messages_of({"role": "assistant", "content": blocks}) == [
        {"role": "assistant", "content": "", "reasoning_content": ""}
    ]


def test_largest_index_of_a_turn_is_read() -> None:
    blocks = [{"type": "thinking", "thinking": "x", "signature": "turn-123456789"}]
    assert messages_of({"role": "assistant", "content": blocks})[0][TURN] == 123456789


def test_results_of_tools_are_messages_of_their_own_and_so_is_the_text_between_them() -> None:
    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    blocks = [
        text("a"), text("b"), {"type": "tool_result", "tool_use_id": "c0", "content": [text("7"), text("8")]},
        {"type": "tool_result", "content": None}, text("c"), text("d"),
    ]  # fmt: skip
    assert messages_of({"role": "user", "content": blocks}) == [
        {"role": "user", "content": "ab"},
        {"role": "tool", "tool_call_id": "c0", "content": "78"},
        {"role": "tool", "tool_call_id": "", "content": ""},
        {"role": "user", "content": "cd"},
    ]


@pytest.mark.parametrize(
    ("message", "said", "param"),
    [
        ({"role": "system", "content": "x"}, "messages[1].role must be user or assistant", "messages[1]"),
        ({"content": "x"}, "messages[1].role must be user or assistant", "messages[1]"),
        ({"role": "user", "content": 3}, "content must be a list of objects", "content"),
        (
            {"role": "user", "content": [{"type": "image"}]},
            "messages[1].content has a part that is not text, but the policy reads only text",
            "messages[1].content",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]},
            "messages[1].content has a part that is not text",
            "messages[1].content",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]},
            "messages[1].content has a part that is not text",
            "messages[1].content",
        ),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking"}]},
            "messages[1]: blocks of type redacted_thinking are not supported here",
            "messages[1]",
        ),
        ({"role": "assistant", "content": [{"type": "text"}]}, "messages[1] has a part that is not", "messages[1]"),
        (
            {"role": "assistant", "content": [{"type": "tool_use"}]},
            "messages[1] needs the name of a tool",
            "messages[1]",
        ),
    ],
)
def test_message_that_cannot_be_read_is_refused_with_its_place(message: Any, said: str, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(messages=[USER, message, USER])
    assert said in str(refused.value)
    assert refused.value.param == param


# ---------------------------------------------------------------- errors and answers


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (409, "invalid_request_error"), (401, "authentication_error"),
        (404, "not_found_error"), (413, "request_too_large"), (500, "api_error"), (503, "api_error"),
    ],
)  # fmt: skip
def test_refusal_has_the_form_that_clients_read(status: int, kind: str) -> None:
    assert DIALECT.error(BadRequest("no", status=status)) == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_full_context_is_said_in_the_words_that_agents_know() -> None:
    error = DIALECT.error(BadRequest("9 tokens", code="context_length_exceeded"))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens"}


def test_answer_has_every_part_in_its_place() -> None:
    message = {"content": "Sum.", "reasoning_content": "hm", "tool_calls": CALLS}
    assert DIALECT.answer(read(model="m"), reply_of(message, "tool_calls")) == {
        "id": "msg_3",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "turn-3"},
            {"type": "text", "text": "Sum.", "citations": None},
            {"type": "tool_use", "id": "c0", "name": "add", "input": {"x": 3}},
            {"type": "tool_use", "id": "c1", "name": "sub", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5, "output_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip


@pytest.mark.parametrize(("why", "said"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")])
def test_end_of_an_answer_has_anthropic_s_name(why: str, said: str) -> None:
    assert DIALECT.answer(read(), reply_of({"content": "x"}, why))["stop_reason"] == said


def test_answer_without_text_has_no_block() -> None:
    assert DIALECT.answer(read(), reply_of({"content": ""}))["content"] == []


def test_token_ids_are_in_an_answer_that_asked_for_them() -> None:
    plain, asked = (DIALECT.answer(read(return_token_ids=wants), reply_of({"content": "7"})) for wants in (False, True))
    assert asked == {**plain, "token_ids": [7, 9], "prompt_token_ids": [1, 2]}


def test_token_ids_are_in_the_event_that_ends_a_streamed_answer() -> None:
    for wants in (False, True):
        request, reply = read(stream=True, return_token_ids=wants), reply_of({"content": "7"})
        *_, ended, _ = [json.loads(one.split("data: ")[1]) for one in events(DIALECT.stream(request), reply)]
        assert ended["type"] == "message_delta"
        ids = {key: ended[key] for key in ("token_ids", "prompt_token_ids") if key in ended}
        assert ids == ({"token_ids": [7, 9], "prompt_token_ids": [1, 2]} if wants else {})


def test_thinking_that_comes_back_names_the_turn_that_signed_it() -> None:
    content = DIALECT.answer(read(), reply_of({"content": "7", "reasoning_content": "hm"}))["content"]
    assert messages_of({"role": "assistant", "content": content}) == [
        {"role": "assistant", "content": "7", "reasoning_content": "hm", TURN: 3}
    ]


def test_streamed_answer_is_its_blocks_in_order() -> None:
    message = {"content": "Sum.", "reasoning_content": "hm", "tool_calls": CALLS[:1]}
    request, reply = read(stream=True), reply_of(message, "tool_calls")
    whole = DIALECT.answer(request, reply)
    lines = [one.split("\n") for one in events(DIALECT.stream(request), reply)]
    assert all(rest == ["", ""] for _, _, *rest in lines)
    made = [json.loads(data.removeprefix("data: ")) for _, data, *_ in lines]
    assert [name.removeprefix("event: ") for name, *_ in lines] == [one["type"] for one in made]
    usage = {**whole["usage"], "output_tokens": 0}

    def start(index: int, block: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, **part: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **part}}

    def stop(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    assert made == [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None, "usage": usage}},
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", thinking="hm"),
        delta(0, "signature_delta", signature="turn-3"),
        stop(0),
        start(1, {"type": "text", "text": "", "citations": None}),
        delta(1, "text_delta", text="Sum."),
        stop(1),
        start(2, {"type": "tool_use", "id": "c0", "name": "add", "input": {}}),
        delta(2, "input_json_delta", partial_json='{"x": 3}'),
        stop(2),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": whole["usage"],
        },
        {"type": "message_stop"},
    ]
