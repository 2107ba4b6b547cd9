"""How the store writes messages for the chat template, and what of them tells conversations apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_tokenizer import byte_tokenizer

from areal_like.trajectory import Segment
from rollout.agent.store import Message, TokenStore, message_key
from rollout.tokens import PromptTokens
from rollout.transcript import Answer

STOP = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.reasoning_content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER: Message = {"role": "user", "content": "?"}


class Store:
    """A store and the tokenizer whose tokens it holds."""

    def __init__(self, **options: Any) -> None:
        self.tokenizer = byte_tokenizer(TEMPLATE)
        stop = self.tokenizer.eos_token_id
        tokens = PromptTokens(self.tokenizer, template=None, add_bos="auto", max_context=1 << 20, stop_ids=(stop,))
        self.store = TokenStore(tokens, stop_marks=(STOP,), **options)

    def text(self, *messages: Message) -> str:
        return str(self.tokenizer.decode(self.store.prompt(messages).transcript.tokens_T))

    def answer(self, *messages: Message, token: int = 5, content: str = "a", reason: Any = "length") -> Message:
        segment = Segment(np.array([token], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
        answer = Answer(segment=segment, finish_reason=reason, number=len(self.store.turns))
        reply = {"role": "assistant", "content": content}
        self.store.record(self.store.prompt(messages), answer, reply, stop="", closing="")
        return reply


def called(arguments: str) -> Message:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("options", "arguments", "written"),
    [
        ({}, '{"x": 1}', '{"x": 1}'),
        ({}, "{x", '"{x"'),
        ({}, "", "{}"),
        ({}, " \n", "{}"),
        ({}, "[" * 3000, f'"{"[" * 3000}"'),
        ({"has_text_arguments": True}, '{"x": 1}', '"{\\"x\\": 1}"'),
    ],
)
def test_arguments_are_an_object_unless_the_template_wants_text(options: Any, arguments: str, written: str) -> None:
    message = called(arguments)
    assert f"<tool_call>{written}</tool_call>" in Store(**options).text(USER, message, USER)
    assert message == called(arguments), "what the client sent is not changed"


def test_tools_whose_parts_come_in_another_order_are_the_same_tools() -> None:
    one = Store()
    tool = {"type": "function", "function": {"name": "f"}}
    segment = Segment(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
    reply = {"role": "assistant", "content": "a"}
    answer = Answer(segment=segment, finish_reason="length", number=0)
    turn = one.store.record(one.store.prompt([USER], [tool]), answer, reply, stop="", closing="")
    prompt = one.store.prompt([USER, reply, USER], [dict(reversed(tool.items()))])
    assert (prompt.anchor, prompt.covered) == (turn, 2)


def test_reasoning_is_not_written_again() -> None:
    said = {"role": "assistant", "content": "a", "reasoning_content": "because"}
    assert Store().text(USER, said, USER).count("because") == 0


def test_conversation_that_ends_with_an_answer_is_no_continuation_of_it() -> None:
    one = Store()
    reply = one.answer(USER)
    prompt = one.store.prompt([USER, reply])
    assert prompt.anchor is None
    assert one.store.num_rendered_again == 0


def test_each_answer_that_no_other_continues_is_a_trajectory_the_last_one_s_first() -> None:
    one = Store()
    reply = one.answer(USER, token=5)
    one.answer(USER, reply, USER, token=6, reason="stop")
    one.answer(USER, reply, {"role": "user", "content": "!"}, token=7)
    made = one.store.trajectories()
    assert [one_.tokens_T[one_.loss_mask_T].tolist() for one_ in made] == [[7], [5, 6]]
    assert [one_.finish_reason for one_ in made] == ["length", "stop"]
    assert [turn.index for turn in one.store.turns] == [0, 1, 2]
    assert [turn.is_continued for turn in one.store.turns] == [True, False, False]
    assert Store().store.trajectories() == []


def test_cut_answer_is_closed_before_the_next_message() -> None:
    one = Store()
    reply = one.answer(USER, token=one_token("x"))
    assert one.text(USER, reply, USER).endswith("x<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")


def one_token(text: str) -> int:
    (token,) = byte_tokenizer(TEMPLATE).encode(text, add_special_tokens=False)
    return int(token)


ANSWER = {"role": "assistant", "content": "7"}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        (USER, {**USER, "content": "? "}, False),
        (USER, {**USER, "role": "system"}, False),
        (USER, {**USER, "tool_call_id": "c"}, True),
        (ANSWER, {**ANSWER, "tool_call_id": "c"}, True),
        (ANSWER, {**ANSWER, "content": "\n7 "}, True),
        ({**ANSWER, "content": ""}, {"role": "assistant", "content": None}, True),
        (RESULT, {**RESULT, "tool_call_id": "d"}, False),
        (RESULT, {**RESULT, "content": "7 "}, False),
        ({**RESULT, "tool_call_id": ""}, {"role": "tool", "content": "7"}, True),
        (called('{"x": 1, "y": 2}'), called('{"y":2,"x":1}'), True),
        (called('{"x": 1}'), called('{"x": 2}'), False),
        (called("{x"), called("{x"), True),
        (called("{x"), called("{y"), False),
        (called("{}"), {**called("{}"), "tool_calls": []}, False),
        (called("{}"), {**called("{}"), "tool_calls": called("{}")["tool_calls"] * 2}, False),
    ],
)
def test_messages_are_distinguished_by_what_every_client_sends_back(
    one: Message, other: Message, are_same: bool
) -> None:
    assert (message_key(one) == message_key(other)) == are_same
