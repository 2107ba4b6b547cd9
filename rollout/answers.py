"""Splits an answer's tokens into the parts of its chat format: reasoning, content and tool calls.

The formats are in rollout/chat.
"""

from __future__ import annotations

import numpy as np

from areal_like.errors import UserError
from rollout.chat.calls import Read, Schemas
from rollout.chat.formats import EARLIER_STOPS, ChatFormat, ParsedAnswer, find_format
from rollout.tokens import PromptTokens
from rollout.transcript import Answer

NUM_OPENING_TOKENS = 32
"""Number of tokens before an answer that show whether the prompt opens its reasoning."""


def read_answer(
    tokens: PromptTokens, chat: ChatFormat, before_T: np.ndarray, answer: Answer, schemas: Schemas
) -> ParsedAnswer:
    """Parse an answer. Never raises.

    before_T: the tokens before it. schemas: of the tools' arguments, as in `ChatFormat.parse`.
    """
    opening = tokens.decode(before_T[-NUM_OPENING_TOKENS:], with_special_tokens=True)
    tokens_R = answer.segment.tokens_R
    text = tokens.decode(tokens_R if answer.stop_token is None else tokens_R[:-1], with_special_tokens=True)
    return chat.parse(text, schemas=schemas, is_reasoning_open=chat.opens_reasoning(opening))


def read_begun(
    tokens: PromptTokens, chat: ChatFormat, before_T: np.ndarray, tokens_R: np.ndarray, *, reads_calls: bool
) -> tuple[str, str]:
    """Reasoning and content of an unfinished answer, without text that its next tokens may change. Never raises.

    reads_calls: text that looks like the beginning of a tool call is left out.
    """
    opening = tokens.decode(before_T[-NUM_OPENING_TOKENS:], with_special_tokens=True)
    text = tokens.decode(tokens_R, with_special_tokens=True)
    return chat.parse_begun(text, is_reasoning_open=chat.opens_reasoning(opening), reads_calls=reads_calls)


def chat_of(tokens: PromptTokens, *, name: str | None, where: str) -> tuple[ChatFormat, str]:
    """The format of the model's answers, and why it cannot call tools (empty if it can).

    Args:
        tokens: tokenizer of the model. name: name of a format; None: detected from the chat template.
        where: the setting that names the format.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    template = tokens.chat_template
    if not template:
        raise UserError(
            "client requests require a chat template, but the tokenizer has none",
            where="model.tokenizer",
            remedy="choose a tokenizer with a chat template",
        )
    try:
        return find_format(template, name=name, where=where), ""
    except UserError as error:
        ends = tuple(tokens.decode(np.array([stop], np.int32), with_special_tokens=True) for stop in tokens.stop_ids)
        ends += tuple(EARLIER_STOPS[end] for end in ends if end in EARLIER_STOPS)
        return ChatFormat(name="text", read=lambda text, _: Read(text.strip()), stop_marks=ends), str(error)
