"""The table of chat formats: the format of each model family's answers, and how a tokenizer's family is detected.

It works on texts only, and imports neither torch nor transformers.

The text of an answer must be decoded with its special tokens: some families have markers among them. Sampled tokens are
never recreated from the parsed text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.errors import UserError
from areal_like.tool_call import ToolCall, call_id
from rollout.chat.calls import (
    Reader,
    Schemas,
    read_deepseek,
    read_hermes,
    read_llama_json,
    read_mistral,
    read_pythonic,
    read_qwen_xml,
)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer in parts. Texts are without the white space around them.

    reasoning: between the reasoning markers; empty: none. content: the rest, without calls. calls: in order; one that
    cannot be parsed has a `fault`. is_reasoning_open: the answer ends before its reasoning is closed, so all of it is
    reasoning.
    """

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    is_reasoning_open: bool = False


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The format of one family's answers.

    name: its name in a configuration. read: parser of its calls. stop_marks: special tokens that end an answer.
    reasoning_marks: markers around its reasoning. signs: texts that a
    chat template of the family contains, all of them; empty: the format must be named. foreign_signs: texts that it
    does not contain. call_marks: a call begins with one of them, except a call that is the whole answer and begins with
    one of call_openings. has_text_arguments: the chat template takes the arguments of past calls as JSON text, not as
    an object. num_past_calls: smallest and largest number of calls in a message for which the template writes the end
    of that message.
    """

    name: str
    read: Reader
    stop_marks: tuple[str, ...]
    signs: tuple[str, ...] = ()
    foreign_signs: tuple[str, ...] = ()
    reasoning_marks: tuple[str, str] = ("<think>", "</think>")
    call_marks: tuple[str, ...] = ()
    call_openings: tuple[str, ...] = ()
    has_text_arguments: bool = False
    num_past_calls: tuple[int, int] = (1, 64)

    def parse(self, text: str, *, schemas: Schemas | None = None, is_reasoning_open: bool = False) -> ParsedAnswer:
        """Parse an answer. Never raises.

        Args:
            text: the answer, decoded with its special tokens; stop marks at its end are dropped.
            schemas: JSON schemas of the tools' arguments, for a notation that does not show the type of a value.
            is_reasoning_open: the prompt ends with the marker that opens the reasoning (`opens_reasoning`).

        Returns:
            Its parts. All text before the end of the last reasoning is reasoning, whatever it begins with; a reasoning
                that is not closed extends to the end of the answer. A call inside it does not count. Markers in the
                arguments of a call that can be parsed are text.

        Example:
            >>> FORMATS["hermes"].parse('<think>Add.</think><tool_call>{"name": "add"}</tool_call><|im_end|>').calls
            (ToolCall(name='add', arguments='{}', fault=''),)
        """
        opens, closes = self.reasoning_marks
        rest, thoughts = self._without_stop(text), []
        begins = rest.lstrip().startswith(opens)
        if begins or is_reasoning_open:
            first, closed, rest = rest.lstrip().removeprefix(opens).partition(closes)
            thoughts = [first]
            if not closed:
                return ParsedAnswer(first.strip(), "", is_reasoning_open=True)
        found = self.read(rest, schemas or {})
        while (at := _last_outside(rest, closes, found.spans)) >= 0:
            thoughts.append(rest[:at])
            rest = rest[at + len(closes) :]
            found = self.read(rest, schemas or {})
        is_open = _last_outside(rest, opens, found.spans) >= 0
        if is_open:
            thoughts.append(rest)
        cleaned = (thought.replace(opens, "").replace(closes, "").strip() for thought in thoughts)
        reasoning = "\n".join(thought for thought in cleaned if thought)
        if is_open:
            return ParsedAnswer(reasoning, "", is_reasoning_open=True)
        return ParsedAnswer(reasoning, found.content, found.calls)

    def parse_begun(self, text: str, *, is_reasoning_open: bool, reads_calls: bool) -> tuple[str, str]:
        """Reasoning and content of an unfinished answer: prefixes of the result of `parse` for the whole answer.

        The exception is an answer that closes its reasoning a second time: earlier content then becomes reasoning.

        Args:
            text: the answer so far. A suffix that may be the beginning of a marker or of a character is left out.
            is_reasoning_open: as in `parse`.
            reads_calls: the answer may call tools.

        Example:
            >>> FORMATS["hermes"].parse_begun("Let me see. <tool", is_reasoning_open=False, reads_calls=True)
            ('', 'Let me see.')
        """
        opens, closes = self.reasoning_marks
        calls = self.call_marks if reads_calls else ()
        reasoning, rest = "", text.rstrip("\ufffd")
        if is_reasoning_open or rest.lstrip().startswith(opens):
            reasoning, closed, rest = rest.lstrip().removeprefix(opens).partition(closes)
            if not closed:
                return _settled(reasoning, (closes, *self.stop_marks)).replace(opens, "").strip(), ""
        if reads_calls and rest.lstrip().startswith(self.call_openings or ("\0",)):
            return reasoning.replace(opens, "").strip(), ""
        content = _settled(rest, (opens, closes, *calls, *self.stop_marks))
        return reasoning.replace(opens, "").strip(), content.strip()

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt, decoded with its special tokens, ends inside the reasoning of the answer that follows."""
        return prompt.rstrip().endswith(self.reasoning_marks[0])

    def closing(self, answer: ParsedAnswer) -> str:
        """Text that closes the reasoning of a truncated answer, so that the end of its turn may follow; it is given,
        not sampled. Empty if its reasoning is closed."""
        return f"\n{self.reasoning_marks[1]}\n\n" if answer.is_reasoning_open else ""

    def past_calls(self, names: Iterable[str]) -> dict[str, Any]:
        """A message of the assistant with calls of these tools, for a chat template that then writes results after it.

        The calls have no arguments, because only the template's text after the message is used.
        """
        fewest, most = self.num_past_calls
        names = [name or "unknown" for name in names][:most]
        names += ["unknown"] * (fewest - len(names))
        arguments: Any = "{}" if self.has_text_arguments else {}
        calls = [
            {"id": call_id(index), "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, name in enumerate(names)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _without_stop(self, text: str) -> str:
        stripped = text.rstrip()
        for mark in self.stop_marks:
            if stripped.endswith(mark):
                return stripped.removesuffix(mark)
        return text


def _settled(text: str, marks: Iterable[str]) -> str:
    """The text before the first marker, and without a suffix that may become one."""
    for mark in marks:
        text = text.partition(mark)[0]
        for size in range(len(mark) - 1, 0, -1):
            if mark.startswith(text[-size:]):
                text = text[:-size]
                break
    return text


def _last_outside(text: str, mark: str, spans: Sequence[tuple[int, int]]) -> int:
    """Position of the last marker outside all spans; -1: there is none."""
    at = text.rfind(mark)
    for begin, end in reversed(spans):
        if at >= end or at < 0:
            break
        at = at if at < begin else text.rfind(mark, 0, begin)
    return at


_CHATML_STOPS = ("<|im_end|>", "<|endoftext|>")
_DEEPSEEK_STOPS = ("<｜end▁of▁sentence｜>",)
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

EARLIER_STOPS = {"<|return|>": "<|end|>"}
"""Markers that end an answer, and what the chat template writes in their place if other messages follow (gpt-oss)."""

FORMATS: dict[str, ChatFormat] = {
    one.name: one
    for one in (
        # Qwen3-Coder, Qwen3.5 and later, Nemotron 3
        ChatFormat(
            name="qwen_xml", read=read_qwen_xml, stop_marks=_CHATML_STOPS, signs=("<tool_call>", "<function="),
            call_marks=("<tool_call>",),
        ),
        # Hermes 2 and later, Qwen2.5, Qwen3
        ChatFormat(
            name="hermes", read=read_hermes, stop_marks=_CHATML_STOPS, signs=("<tool_call>", "arguments"),
            foreign_signs=("<function=", "<arg_key>", "<|tool_call>"), call_marks=("<tool_call>",),
        ),
        # Llama 3.1 to 3.3
        ChatFormat(
            name="llama3_json", read=read_llama_json, stop_marks=("<|eot_id|>", "<|eom_id|>"),
            signs=("<|eot_id|>", "ipython", '"parameters": '), num_past_calls=(1, 1), call_marks=("<|python_tag|>",),
            call_openings=("{",),
        ),
        # Llama models that were trained to write Python calls; it cannot be detected from a template
        ChatFormat(
            name="llama_pythonic", read=read_pythonic, stop_marks=("<|eot_id|>", "<|eot|>", "<|eom_id|>", "<|eom|>"),
            call_openings=("[", "<|python_start|>"),
        ),
        ChatFormat(
            name="mistral", read=read_mistral, stop_marks=("</s>",), signs=("[TOOL_CALLS]",),
            reasoning_marks=("[THINK]", "[/THINK]"), call_marks=("[TOOL_CALLS]",),
        ),
        # DeepSeek V3 and R1: arguments in a fenced block. Their template ends a message after its second call only.
        ChatFormat(
            name="deepseek_v3", read=read_deepseek, stop_marks=_DEEPSEEK_STOPS,
            signs=("<｜tool▁call▁begin｜>", "```json"), has_text_arguments=True, num_past_calls=(2, 64),
            call_marks=_DEEPSEEK_CALLS,
        ),
        # DeepSeek V3.1: arguments after the name
        ChatFormat(
            name="deepseek_v31", read=read_deepseek, stop_marks=_DEEPSEEK_STOPS, signs=("<｜tool▁call▁begin｜>",),
            foreign_signs=("```json",), has_text_arguments=True, call_marks=_DEEPSEEK_CALLS,
        ),
    )
}  # fmt: skip
"""Chat formats by name."""


def find_format(chat_template: Any, *, name: str | None = None, where: str) -> ChatFormat:
    """The format of a tokenizer's answers.

    Args:
        chat_template: the tokenizer's template: text, or texts by name, or None. name: a key of FORMATS, or None to
            detect the format.
        where: the setting that names the format.

    Raises:
        UserError: there is no format of that name, or the template shows none.
    """
    known = ", ".join(FORMATS)
    if name is not None:
        if name in FORMATS:
            return FORMATS[name]
        near = difflib.get_close_matches(name, FORMATS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {known}"
        raise UserError(f"there is no chat format `{name}`", where=where, remedy=remedy)
    template = _joined(chat_template)
    if not template:
        raise UserError(
            "the tokenizer has no chat template",
            where=where,
            remedy="set model.tokenizer to a tokenizer with a chat template",
        )
    for one in FORMATS.values():
        has_all = bool(one.signs) and all(sign in template for sign in one.signs)
        if has_all and not any(sign in template for sign in one.foreign_signs):
            return one
    remedy = f"set the format that the model was trained with, one of {known}"
    raise UserError("the format of tool calls in the tokenizer's chat template is unknown", where=where, remedy=remedy)


def _joined(chat_template: Any) -> str:
    if isinstance(chat_template, Mapping):
        return "\n".join(map(str, chat_template.values()))
    return str(chat_template or "")
