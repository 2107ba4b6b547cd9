"""An answer's tokens in the parts of its chat format: special tokens are read, the stop is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_tokenizer import byte_tokenizer

from areal_like.tool_call import ToolCall
from areal_like.trajectory import Segment
from rollout.answers import read_answer
from rollout.chat.formats import FORMATS, ParsedAnswer
from rollout.tokens import PromptTokens
from rollout.transcript import Answer

HERMES = FORMATS["hermes"]
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def tokens() -> PromptTokens:
    tokenizer = byte_tokenizer("{{ messages }}")
    tokenizer.add_tokens("[TOOL_CALLS]", special_tokens=True)
    return PromptTokens(
        tokenizer, template=None, add_bos="auto", max_context=100, stop_ids=(tokenizer.eos_token_id,)
    )  # fmt: skip


def read(tokens: PromptTokens, before: str, text: str, *, has_stop: bool, chat: Any = HERMES) -> ParsedAnswer:
    made = tokens.encode(text)
    segment = Segment(made, np.zeros(len(made), np.float32), np.zeros(len(made), np.int32))
    stop = int(made[-1]) if has_stop else None
    answer = Answer(segment=segment, finish_reason="stop" if has_stop else "length", stop_token=stop)
    return read_answer(tokens, chat, tokens.encode(before), answer, {})


def test_stop_token_is_no_part_of_the_answer_whatever_it_is(tokens: PromptTokens) -> None:
    assert read(tokens, "?", "7x", has_stop=True).content == "7"
    assert read(tokens, "?", "7x", has_stop=False).content == "7x"
    assert read(tokens, "?", "7<|im_end|>", has_stop=True).content == "7"


def test_marks_that_are_special_tokens_are_read(tokens: PromptTokens) -> None:
    parsed = read(tokens, "?", '[TOOL_CALLS]add[ARGS]{"x": 1}', has_stop=False, chat=FORMATS["mistral"])
    assert parsed == ParsedAnswer("", "", (ToolCall("add", '{"x": 1}'),))


@pytest.mark.parametrize(
    ("before", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<think>" + " " * 31, True),
        ("<think></think>", False),
    ],
)
def test_reasoning_that_the_tokens_before_opened_goes_on(tokens: PromptTokens, before: str, is_open: bool) -> None:
    expected = ParsedAnswer("a", "", is_reasoning_open=True) if is_open else ParsedAnswer("", "a")
    assert read(tokens, before, "a", has_stop=False) == expected


def test_call_of_a_cut_answer_is_read_too(tokens: PromptTokens) -> None:
    assert read(tokens, "?", f"a{CALL}", has_stop=False) == ParsedAnswer("", "a", (ToolCall("add", "{}"),))
