"""The dialect of Responses as plain functions: what a request means, and every part of an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout.agent.dialect import AgentRequest, BadRequest, Reply, events
from rollout.agent.responses import Responses
from rollout.agent.store import TURN, Message

USER = {"role": "user", "content": "3 and 4?"}
ADD = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}
ADD_FOR_TEMPLATE = {"name": "add", "description": "d", "parameters": {"type": "object"}}
CALLS: list[dict[str, Any]] = [
    {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}},
    {"id": "c1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
]
DIALECT = Responses()


def earlier(index: int) -> list[Message]:
    return [{"role": "user", "content": "before"}, {"role": "assistant", "content": str(index)}]


def read(**body: Any) -> AgentRequest:
    return DIALECT.read({"input": [USER], **body}, earlier)


def messages_of(*items: Any) -> list[Message]:
    return read(input=[*items, USER]).messages[:-1]


def reply_of(message: dict[str, Any], finish_reason: str = "stop") -> Reply:
    return Reply(
        index=3, created=1700, message={"role": "assistant", **message}, finish_reason=finish_reason,
        num_prompt=5, prompt_ids=[1, 2], tokens_R=np.array([7, 9], np.int32), token_texts=[],
        logprobs_R=np.array([-0.5, -0.25], np.float32),
    )  # fmt: skip


# ---------------------------------------------------------------- requests


def test_request_with_input_alone_has_the_settings_of_the_run() -> None:
    assert read() == AgentRequest(
        model="policy", messages=[USER], tools=[], reads_calls=False, max_tokens=None, is_streamed=False,
        wants_usage=False, wants_logprobs=False, wants_token_ids=False, num_instructions=0,
    )  # fmt: skip
    assert read(input="3 and 4?") == read()


def test_each_setting_of_a_request_is_read() -> None:
    made = read(
        model="m", instructions="s", tools=[ADD], max_output_tokens=1, stream=True, return_token_ids=True,
        text={"format": {"type": "text"}},
    )  # fmt: skip
    assert made == AgentRequest(
        model="m", messages=[{"role": "system", "content": "s"}, USER], is_streamed=True, wants_token_ids=True,
        tools=[{"type": "function", "function": ADD_FOR_TEMPLATE}], reads_calls=True, max_tokens=1, num_instructions=1,
    )  # fmt: skip


def test_instructions_stand_before_the_conversation_that_a_response_names() -> None:
    made = read(instructions="s", previous_response_id="resp_123456789")
    assert [one["content"] for one in made.messages] == ["s", "before", "123456789", "3 and 4?"]
    assert made.num_instructions == 1


@pytest.mark.parametrize("name", ["resp_", "resp_1234567890", "resp_x", "xresp_1", "resp_1 ", 3, ""])
def test_response_that_was_never_given_is_not_found(name: Any) -> None:
    with pytest.raises(BadRequest, match=f"there is no response {name}") as refused:
        read(previous_response_id=name)
    assert (refused.value.param, refused.value.status) == ("previous_response_id", 404)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("background", True, "wait for the answer"),
        ("conversation", "x", "use previous_response_id, or send the whole conversation"),
        ("prompt", {"id": "x"}, "send the messages themselves"),
    ],
)
def test_setting_that_would_change_the_answer_is_refused_with_a_remedy(name: str, value: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(**{name: value})
    assert str(refused.value) == f"{name} is not supported here: {said}"
    assert refused.value.param == name


def test_the_same_settings_with_values_that_change_nothing_are_taken() -> None:
    assert read(background=False, conversation=None, prompt=None, text={}, temperature=0.0) == read(text="x") == read()


def test_answer_cannot_be_constrained() -> None:
    with pytest.raises(BadRequest, match="answers cannot be constrained") as refused:
        read(text={"format": {"type": "json_schema"}})
    assert refused.value.param == "text.format"


def test_tools_are_written_for_the_chat_template() -> None:
    bare = {"type": "function", "name": "a", "description": None, "parameters": None}
    assert [tool["function"] for tool in read(tools=[ADD, bare]).tools] == [ADD_FOR_TEMPLATE, {"name": "a"}]


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"name": "a"}, {"type": "function"},
                                  {"type": "custom", "name": "a"}, {"type": "function", "name": 3}])  # fmt: skip
def test_tool_that_does_not_run_here_is_refused(tool: Any) -> None:
    with pytest.raises(BadRequest, match="every tool must be") as refused:
        read(tools=[ADD, tool])
    assert refused.value.param == "tools"


@pytest.mark.parametrize("given", [None, []])
def test_conversation_that_asks_nothing_is_refused(given: Any) -> None:
    with pytest.raises(BadRequest, match="input must contain at least one message") as refused:
        read(input=given)
    assert refused.value.param == "input"
    with pytest.raises(BadRequest, match="the last message must not be an assistant message"):
        read(input=given, previous_response_id="resp_0")


# ---------------------------------------------------------------- items


def test_messages_of_every_role_are_read() -> None:
    items = [{"role": role, "content": role} for role in ("system", "developer", "user", "assistant")]
    assert messages_of(*items) == messages_of(*({**item, "type": "message"} for item in items))
    assert [(one["role"], one["content"]) for one in messages_of(*items)] == [
        ("system", "system"), ("system", "developer"), ("user", "user"), ("assistant", "assistant"),
    ]  # fmt: skip


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of({"role": "user", "content": parts}) == [{"role": "user", "content": "ab"}]
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert messages_of({"role": "assistant", "content": parts}) == [{"role": "assistant", "content": "ab"}]


def called(place: int, **more: Any) -> dict[str, Any]:
    function = CALLS[place]["function"]
    return {"type": "function_call", "call_id": CALLS[place]["id"], **function, **more}


def reasoned(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": said}], **more}


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        reasoned("H", id="rs_3"),
        reasoned("m", id="rs_3"),
        {"type": "message", "id": "msg_3", "role": "assistant", "content": "Su"},
        {"role": "assistant", "content": "m."},
        called(0, id="fc_3_0"),
        called(1, id="fc_3_1"),
    ]
    assert messages_of(*items) == [
        {"role": "assistant", "content": "Sum.", "reasoning_content": "Hm", TURN: 3, "tool_calls": CALLS}
    ]


@pytest.mark.parametrize(
    ("ids", "turns"),
    [
        (("msg_0", "msg_1"), [0, 1]),
        (("msg_1", "msg_1"), [1]),
        ((None, "msg_1"), [1]),
        (("msg_0", None), [0]),
        ((None, None), [None]),
        (("msg_0", None, "msg_1"), [0, 1]),
    ],
)
def test_answers_with_ids_of_different_turns_stay_apart(ids: tuple[str | None, ...], turns: list[int | None]) -> None:
    items = [{"type": "message", "id": name, "role": "assistant", "content": "x"} for name in ids]
    made = messages_of(*items)
    assert [one.get(TURN) for one in made] == turns
    assert "".join(one["content"] for one in made) == "x" * len(ids)


def test_messages_that_are_not_the_assistant_s_are_never_joined() -> None:
    result = {"type": "function_call_output", "call_id": "c0", "output": "7"}
    made = messages_of(USER, USER, called(0), result, {**result, "call_id": None}, {"role": "assistant", "content": ""})
    assert [one["role"] for one in made] == ["user", "user", "assistant", "tool", "tool", "assistant"]
    assert made[3:5] == [
        {"role": "tool", "tool_call_id": "c0", "content": "7"}, {"role": "tool", "tool_call_id": "", "content": "7"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("msg_7", 7), ("fc_7_1", 7), ("rs_7", 7), ("msg_123456789", 123456789), ("msg_1234567890", None),
        ("msg_", None), ("xx_7", None), ("msg_7x", None), ("msg_7_", None), ("xmsg_7", None), (7, None),
    ],
)  # fmt: skip
def test_id_of_an_item_names_its_turn(name: Any, turn: int | None) -> None:
    (made,) = messages_of({"type": "message", "id": name, "role": "assistant", "content": "x"})
    assert made.get(TURN) == turn
    (asked,) = messages_of({"type": "message", "id": name, "role": "user", "content": "x"})
    assert TURN not in asked


def test_reasoning_is_its_content_and_its_summary() -> None:
    summary = [{"type": "summary_text", "text": "b"}, {"type": "summary_text", "text": None}]
    assert messages_of(reasoned("a", summary=summary)) == [
        {"role": "assistant", "content": "", "reasoning_content": "ab"}
    ]
    assert messages_of({"type": "reasoning"}) == [{"role": "assistant", "content": "", "reasoning_content": ""}]


@pytest.mark.parametrize(
    ("item", "said", "param"),
    [
        ({"role": "tool"}, "input[1].role must be one of system, developer, user, assistant", "input[1]"),
        ({"type": "message"}, "input[1].role must be one of", "input[1]"),
        ({"role": "user", "content": 3}, "input[1].content must be text or a list of parts", "input[1].content"),
        ({"role": "assistant", "content": 3}, "input[1].content must be text or", "input[1].content"),
        ({"type": "function_call_output", "output": 3}, "input[1].output must be text or", "input[1].output"),
        ({"type": "function_call"}, "input[1] needs the name of a tool and its arguments", "input[1]"),
        ({"type": "item_reference"}, "input[1]: items of type item_reference are not supported here", "input[1]"),
        ({"type": "reasoning", "content": "x"}, "content must be a list of objects", "content"),
        ("x", "input must be a list of objects", "input"),
    ],
)
def test_item_that_cannot_be_read_is_refused_with_its_place(item: Any, said: str, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(input=[USER, item, USER])
    assert said in str(refused.value)
    assert refused.value.param == param


# ---------------------------------------------------------------- answers


SAID = {"content": "Sum.", "reasoning_content": "hm", "tool_calls": CALLS}
REASONING_PART = {"type": "reasoning_text", "text": "hm"}
TEXT_PART = {"type": "output_text", "text": "Sum.", "annotations": [], "logprobs": []}


def items_of(status: str) -> list[dict[str, Any]]:
    return [
        {"id": "rs_3", "type": "reasoning", "summary": [], "content": [REASONING_PART], "status": "completed"},
        {"id": "msg_3", "type": "message", "role": "assistant", "content": [TEXT_PART], "status": status},
        {"type": "function_call", "id": "fc_3_0", "call_id": "c0", "name": "add", "arguments": '{"x": 3}',
         "status": "completed"},
        {"type": "function_call", "id": "fc_3_1", "call_id": "c1", "name": "sub", "arguments": "{}",
         "status": "completed"},
    ]  # fmt: skip


def test_answer_has_every_part_in_its_place() -> None:
    assert DIALECT.answer(read(model="m"), reply_of(SAID, "tool_calls")) == {
        "id": "resp_3",
        "object": "response",
        "created_at": 1700,
        "status": "completed",
        "incomplete_details": None,
        "error": None,
        "model": "m",
        "output": items_of("completed"),
        "instructions": None,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "metadata": {},
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 7,
        },
    }


def test_cut_answer_is_incomplete_and_says_why() -> None:
    body = DIALECT.answer(read(), reply_of(SAID, "length"))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"] == items_of("incomplete"), "the reasoning had ended"
    (alone,) = DIALECT.answer(read(), reply_of({"content": "", "reasoning_content": "hm"}, "length"))["output"]
    assert alone["status"] == "incomplete"


def test_answer_repeats_the_instructions_and_the_tools_of_its_request() -> None:
    body = DIALECT.answer(read(instructions="s", tools=[ADD]), reply_of({"content": "7"}))
    assert (body["instructions"], body["tool_choice"]) == ("s", "auto")
    assert body["tools"] == [{**ADD, "strict": False}]
    system = {"role": "system", "content": "s"}
    assert DIALECT.answer(read(input=[system, USER]), reply_of({"content": "7"}))["instructions"] is None


def test_answer_without_text_has_no_item() -> None:
    assert DIALECT.answer(read(), reply_of({"content": ""}))["output"] == []


def test_token_ids_are_in_an_answer_that_asked_for_them() -> None:
    plain, asked = (DIALECT.answer(read(return_token_ids=wants), reply_of({"content": "7"})) for wants in (False, True))
    assert asked == {**plain, "token_ids": [7, 9], "prompt_token_ids": [1, 2]}


LOGPROBS = [
    {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": []},
    {"token": "<|im_end|>", "logprob": -0.25, "bytes": list(b"<|im_end|>"), "top_logprobs": []},
]
INCLUDED = {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}


def test_log_probs_of_all_sampled_tokens_are_in_the_text_of_an_answer_that_asked_for_them() -> None:
    assert not read(include=["reasoning.encrypted_content"]).wants_logprobs
    request = read(stream=True, **INCLUDED)
    assert request.wants_logprobs
    reply = replace(reply_of({"content": "Sum.", "reasoning_content": "hm"}), token_texts=["é", "<|im_end|>"])
    reasoning, said = DIALECT.answer(request, reply)["output"]
    assert said["content"] == [{**TEXT_PART, "logprobs": LOGPROBS}]
    assert "logprobs" not in reasoning["content"][0]
    made = [json.loads(one.split("\n")[1].removeprefix("data: ")) for one in events(DIALECT.stream(request), reply)]
    by_type = {one["type"].removeprefix("response."): one for one in made}
    assert by_type["output_text.delta"]["logprobs"] == []
    assert by_type["output_text.done"]["logprobs"] == LOGPROBS
    assert by_type["content_part.done"]["part"]["logprobs"] == LOGPROBS
    assert by_type["output_item.done"]["item"] == by_type["completed"]["response"]["output"][1] == said
    (alone,) = DIALECT.answer(request, replace(reply, message={"content": "", "tool_calls": CALLS[:1]}))["output"]
    assert alone["type"] == "function_call"


@pytest.mark.parametrize("include", ["message.output_text.logprobs", {"message": True}])
def test_include_that_is_no_list_is_refused(include: Any) -> None:
    with pytest.raises(BadRequest, match="include must be a list") as refused:
        read(include=include)
    assert refused.value.param == "include"


def test_output_that_comes_back_names_its_turn() -> None:
    output = DIALECT.answer(read(), reply_of(SAID, "tool_calls"))["output"]
    assert messages_of(*output) == [{"role": "assistant", **SAID, TURN: 3}]


def test_refusal_has_the_form_that_clients_read() -> None:
    assert DIALECT.error(BadRequest("no", status=503, code="sample_cut")) == {
        "error": {"message": "no", "type": "server_error", "param": None, "code": "sample_cut"}
    }


@pytest.mark.parametrize(("why", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_streamed_answer_is_its_items_in_order(why: str, status: str) -> None:
    request, reply = read(stream=True), reply_of({**SAID, "tool_calls": CALLS[:1]}, why)
    whole = DIALECT.answer(request, reply)
    lines = [one.split("\n") for one in events(DIALECT.stream(request), reply)]
    made = [json.loads(data.removeprefix("data: ")) for _, data, *_ in lines]
    assert [name.removeprefix("event: ") for name, *_ in lines] == [one["type"] for one in made]
    assert [one.pop("sequence_number") for one in made] == list(range(len(made)))
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    reasoning, said, call = whole["output"]

    def around(index: int, item: Any, empty: Any, *inner: tuple[str, Any]) -> list[dict[str, Any]]:
        at = {"output_index": index}
        begun = {**item, "status": "in_progress", **empty}
        return [
            {"type": "response.output_item.added", "item": begun, **at},
            *({"type": f"response.{kind}", "item_id": item["id"], **at, **more} for kind, more in inner),
            {"type": "response.output_item.done", "item": item, **at},
        ]

    def text(kind: str, part: Any, **more: Any) -> list[tuple[str, Any]]:
        at = {"content_index": 0}
        return [
            ("content_part.added", {"part": {**part, "text": ""}, **at}),
            (f"{kind}.delta", {"delta": part["text"], **more, **at}),
            (f"{kind}.done", {"text": part["text"], **more, **at}),
            ("content_part.done", {"part": part, **at}),
        ]

    written = call["arguments"]
    assert made == [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *around(0, reasoning, {"content": []}, *text("reasoning_text", REASONING_PART)),
        *around(1, said, {"content": []}, *text("output_text", TEXT_PART, logprobs=[])),
        *around(
            2, call, {"arguments": ""},
            ("function_call_arguments.delta", {"delta": written}),
            ("function_call_arguments.done", {"arguments": written, "name": "add"}),
        ),
        {"type": f"response.{status}", "response": whole},
    ]  # fmt: skip
