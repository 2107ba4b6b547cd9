"""The chat dialect as plain functions: what a request means, and every part of an answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollout.agent import dialect as module
from rollout.agent.chat_completions import ChatCompletions
from rollout.agent.dialect import AgentRequest, BadRequest, Reply

USER = {"role": "user", "content": "3 and 4?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS: list[dict[str, Any]] = [
    {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}},
    {"id": "c00000001", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
]


DIALECT = ChatCompletions()


def no_earlier(_: int) -> Any:
    raise AssertionError("each request holds its whole conversation")


def read(**body: Any) -> AgentRequest:
    return DIALECT.read({"messages": [USER], **body}, no_earlier)


def reply_of(message: dict[str, Any], finish_reason: str = "stop") -> Reply:
    return Reply(
        index=3, created=1700, message={"role": "assistant", **message}, finish_reason=finish_reason,
        num_prompt=3, prompt_ids=[1, 2, 3], tokens_R=np.array([7, 9], np.int32), token_texts=["é", "<|im_end|>"],
        logprobs_R=np.array([-0.5, -0.25], np.float32),
    )  # fmt: skip


# ---------------------------------------------------------------- requests


def test_request_with_messages_alone_has_the_settings_of_the_run() -> None:
    assert read() == AgentRequest(
        model="policy", messages=[USER], tools=[], reads_calls=False, max_tokens=None, is_streamed=False,
        wants_usage=False, wants_logprobs=False, wants_token_ids=False, num_instructions=0,
    )  # fmt: skip


def test_each_setting_of_a_request_is_read() -> None:
    made = read(
        model="m", tools=[ADD], max_tokens=1, stream=True, stream_options={"include_usage": True}, logprobs=True,
        return_token_ids=True,
    )  # fmt: skip
    assert made == AgentRequest(
        model="m", messages=[USER], tools=[ADD], reads_calls=True, max_tokens=1, is_streamed=True, wants_usage=True,
        wants_logprobs=True, wants_token_ids=True, num_instructions=0,
    )  # fmt: skip


@pytest.mark.parametrize("stream_options", [None, {}, {"include_usage": False}, "include_usage"])
def test_usage_is_streamed_only_where_it_is_asked_for(stream_options: Any) -> None:
    assert not read(stream=True, stream_options=stream_options).wants_usage


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "5"])
def test_limit_of_tokens_that_is_no_positive_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"{name} must be a whole number of at least 1") as refused:
        read(**{name: value})
    assert refused.value.param == name


def test_newer_name_of_the_limit_of_tokens_is_preferred() -> None:
    assert read(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert read(max_completion_tokens=None, max_tokens=9).max_tokens == 9


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("n", 2, "send several requests instead"),
        ("best_of", 2, "send several requests instead"),
        ("logit_bias", {"5": 1}, "training requires the policy's own distribution"),
        ("stop", ["x"], "only the model can end an answer"),
        ("functions", [{}], "use tools"),
        ("function_call", "none", "use tools"),
        ("audio", {"voice": "x"}, "answers are always text"),
        ("top_logprobs", 3, "only the log-probs of the sampled tokens are known"),
    ],
)
def test_setting_that_would_change_the_answer_is_refused_with_a_remedy(name: str, value: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(**{name: value})
    assert str(refused.value) == f"{name} is not supported here: {said}"
    assert (refused.value.param, refused.value.status, refused.value.code) == (name, 400, "invalid_request")


def test_the_same_settings_with_values_that_change_nothing_are_taken() -> None:
    harmless = {"n": 1, "best_of": 1, "logit_bias": {}, "stop": [], "functions": [], "function_call": "auto",
                "audio": {}, "top_logprobs": 0}  # fmt: skip
    assert read(**harmless) == read()
    assert read(**dict.fromkeys(harmless)) == read()
    assert read(response_format={"type": "text"}) == read(response_format={}) == read()


def test_settings_of_sampling_are_the_run_s() -> None:
    assert read(temperature=0.0, top_p=0.1, seed=3, presence_penalty=1.0) == read()


def test_answer_cannot_be_constrained_and_no_tool_can_be_forced() -> None:
    with pytest.raises(BadRequest, match="answers cannot be constrained") as refused:
        read(response_format={"type": "json_schema"})
    assert refused.value.param == "response_format"
    with pytest.raises(BadRequest, match="the policy decides which tools it calls") as refused:
        read(tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}})
    assert refused.value.param == "tool_choice"


def test_tools_are_offered_unless_the_choice_is_none() -> None:
    assert read(tools=[ADD], tool_choice="auto").tools == [ADD]
    assert read(tools=[ADD], tool_choice=None).tools == [ADD]
    assert read(tools=[ADD]).reads_calls
    none = read(tools=[ADD], tool_choice="none")
    assert (none.tools, none.reads_calls) == ([ADD], False), "they are shown, but an answer calls none"
    assert read(tools=[]).tools == read(tools=None).tools == []


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({"type": "function"}, "tools must be a list"),
        (["add"], "tools must be a list of objects"),
        ([ADD, {**ADD, "type": "custom"}], "every tool must be"),
        ([{"type": "function", "function": "add"}], "every tool must be"),
        ([{"type": "function", "function": {"name": 3}}], "every tool must be"),
    ],
)
def test_tools_that_cannot_be_read_are_refused(tools: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        read(tools=tools)
    assert refused.value.param == "tools"


# ---------------------------------------------------------------- messages


def test_messages_of_every_role_are_read() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "d"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": None, "name": "u", "tool_call_id": "x", "tool_calls": [1]},
        {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c00000000", "name": "add", "content": "7", "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": None, "name": "", "content": "-1"},
    ]
    assert read(messages=messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "c00000000", "name": "add"},
        {"role": "tool", "content": "-1"},
    ]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": kind, "text": text} for kind, text in
             (("text", "a"), ("input_text", "b "), ("output_text", "c"))]  # fmt: skip
    assert read(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "ab c"
    assert read(messages=[{"role": "user", "content": []}]).messages[0]["content"] == ""


def test_arguments_of_past_calls_become_text_and_missing_ones_an_empty_object() -> None:
    calls = [{"function": {"name": "add", "arguments": {"x": 3}}}, {"id": None, "function": {"name": "sub"}}]
    made = read(messages=[{"role": "assistant", "tool_calls": calls}, USER]).messages[0]["tool_calls"]
    assert made == [
        {"id": "", "type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}},
        {"id": "", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]


def test_assistant_s_message_without_calls_and_reasoning_has_neither() -> None:
    message = {"role": "assistant", "content": "7", "tool_calls": [], "reasoning_content": None}
    assert read(messages=[message, USER]).messages[0] == {"role": "assistant", "content": "7"}


@pytest.mark.parametrize(
    ("message", "said", "param"),
    [
        ("hello", "messages must be a list of objects", "messages"),
        (
            {"role": "robot"},
            "messages[1].role must be one of system, developer, user, assistant, tool",
            "messages[1]",
        ),
        ({"content": "x"}, "messages[1].role must be one of", "messages[1]"),
        ({"role": "user", "content": 3}, "messages[1].content must be text or a list", "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content has a part that", "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content has a part", "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "image", "text": "x"}]},
            "messages[1].content has a part that is not text, but the policy reads only text",
            "messages[1].content",
        ),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls must be a list of objects", "tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": "x"}]},
            "messages[1].tool_calls needs function.name and function.arguments",
            "messages[1].tool_calls",
        ),
        ({"role": "assistant", "tool_calls": ["x"]}, "tool_calls must be a list of objects", "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "needs the name of a tool", "messages[1].tool_calls"),
    ],
)
def test_message_that_cannot_be_read_is_refused_with_its_place(message: Any, said: str, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(messages=[USER, message, USER])
    assert said in str(refused.value)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "at least one message"),
        ([], "at least one message"),
        (USER, "messages must be a list of objects"),
        ([USER, {"role": "assistant", "content": "7"}], "the last message must not be an assistant message"),
    ],
)
def test_conversation_that_asks_nothing_is_refused(messages: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        read(messages=messages)
    assert refused.value.param == "messages"


# ---------------------------------------------------------------- errors and answers


def test_refusal_has_the_form_that_clients_read() -> None:
    assert BadRequest("no").status == 400
    assert DIALECT.error(BadRequest("no")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    }
    assert DIALECT.error(BadRequest("who", status=401, code="invalid_api_key", param="key")) == {
        "error": {"message": "who", "type": "authentication_error", "param": "key", "code": "invalid_api_key"}
    }


def test_answer_has_every_part_in_its_place() -> None:
    assert DIALECT.answer(read(model="m"), reply_of({"content": "7", "reasoning_content": "hm"})) == {
        "id": "chatcmpl-3",
        "object": "chat.completion",
        "created": 1700,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "7", "refusal": None, "reasoning_content": "hm"},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_log_probs_and_token_ids_are_in_an_answer_that_asked_for_them() -> None:
    body = DIALECT.answer(read(logprobs=True, return_token_ids=True), reply_of({"content": "é"}))
    assert body["prompt_token_ids"] == [1, 2, 3]
    assert body["choices"][0]["token_ids"] == [7, 9]
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": []},
            {"token": "<|im_end|>", "logprob": -0.25, "bytes": list(b"<|im_end|>"), "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_half_of_a_surrogate_pair_has_bytes() -> None:
    one = np.ones(1, np.float32)
    reply = Reply(0, 0, {"role": "assistant", "content": ""}, "stop", 0, [], one.astype(np.int32), -one, ["\ud83d"])
    logprobs = DIALECT.answer(read(logprobs=True), reply)["choices"][0]["logprobs"]
    assert logprobs["content"][0]["bytes"] == [ord("?")]


def events(request: AgentRequest, reply: Reply) -> list[Any]:
    *made, last = module.events(DIALECT.stream(request), reply)
    assert last == "data: [DONE]\n\n"
    assert all(one.startswith("data: ") and one.endswith("\n\n") for one in made)
    return [json.loads(one.removeprefix("data: ")) for one in made]


def test_streamed_answer_is_one_event_for_each_part_in_order() -> None:
    message = {"content": "Sum.", "reasoning_content": "hm", "tool_calls": CALLS}
    head = {"id": "chatcmpl-3", "object": "chat.completion.chunk", "created": 1700, "model": "policy"}
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Sum."},
        {"tool_calls": [{"index": 0, **CALLS[0], "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": 3}'}}]},
        {"tool_calls": [{"index": 1, **CALLS[1], "function": {"name": "sub", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]  # fmt: skip
    made = events(read(stream=True), reply_of(message, "tool_calls"))
    assert made == [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "tool_calls",
                              "logprobs": None}]}
        for delta in deltas
    ]  # fmt: skip


def test_streamed_answer_without_text_has_no_event_for_it() -> None:
    made = events(read(stream=True), reply_of({"content": ""}))
    assert [chunk["choices"][0]["delta"] for chunk in made] == [{"role": "assistant", "content": ""}, {}]


def test_last_events_of_a_stream_carry_what_was_asked_for() -> None:
    asked = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    *before, last, usage = events(read(stream=True, **asked), reply_of({"content": "é"}))
    body = DIALECT.answer(read(**asked), reply_of({"content": "é"}))
    assert last["choices"][0]["logprobs"] == body["choices"][0]["logprobs"]
    assert last["choices"][0]["token_ids"] == [7, 9]
    assert (usage["choices"], usage["usage"]) == ([], body["usage"])
    assert all(chunk["choices"][0]["logprobs"] is None and "token_ids" not in chunk["choices"][0] for chunk in before)
    prompts = [chunk.get("prompt_token_ids") for chunk in (*before, last, usage)]
    assert prompts == [[1, 2, 3]] + [None] * len(prompts[1:]), "the prompt comes first, as in vLLM"


def test_answer_without_text_is_empty_text_or_nothing_next_to_calls() -> None:
    for message, content in (({"content": ""}, ""), ({"content": "", "tool_calls": CALLS}, None)):
        assert DIALECT.answer(read(), reply_of(message))["choices"][0]["message"]["content"] == content
