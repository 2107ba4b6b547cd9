"""Conversations of rows with tool calls: checks, and the assistant's turns as the chat template writes them.

Rows have calls in the form of OpenAI, TRL and Hugging Face's data sets. Text that a policy sampled is not parsed here:
see rollout/chat.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_like.errors import UserError
from areal_like.finite_json import loads_finite
from areal_like.tool_call import call_id

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]
REASONING = "reasoning_content"
"""Key of a message with the reasoning before its content."""
NOT_WRITTEN = (
    "set model.tokenizer to a tokenizer whose chat template renders tool calls, or write each call into the message's "
    "`content` as the model is to write it, and remove `tool_calls`"
)
_USER = {"role": "user", "content": "-"}
_PLACEHOLDER = "PLACEHOLDER"
_CALL_WORDS = "{function: {name, arguments}}"
_EMPTY_REASONING = re.compile(r"\s*<think>\s*</think>\s*")
_REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Template(Protocol):
    """What a turn is written with; see `areal_like.prompts.PromptEncoder`."""

    def chat_text(self, messages: Any, *, is_whole: bool = False, tools: Tools = ()) -> str: ...

    def is_ended(self, text: str, stop: str, content: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of tool calls that some chat templates take.

    is_numbered: ids are those of `call_id`; otherwise those of the row. has_text_arguments: arguments are JSON text,
    otherwise an object.
    """

    is_numbered: bool
    has_text_arguments: bool


FORMS = tuple(CallForm(*one) for one in itertools.product((False, True), repeat=2))
"""All forms, in the order in which they are tried."""


# ---------------------------------------------------------------- rows


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row: a list of JSON schemas, or such a list as JSON text; None: no tools. Raises
    UserError.
    """
    if value is None:
        return []
    tools = _parsed(value) if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) and _name_of(one) for one in tools):
        raise UserError(
            "`tools` must be a list of JSON schemas with a name, or such a list as JSON text",
            remedy="write {type: function, function: {name, description, parameters}} for each tool",
        )
    return [dict(one) for one in tools]


def _name_of(tool: Mapping[str, Any]) -> bool:
    inner = tool.get("function", tool)
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str) and bool(inner["name"])


def has_calls(message: Mapping[str, Any]) -> bool:
    """Whether it is a message of the assistant with tool calls."""
    return message.get("role") == "assistant" and bool(message.get("tool_calls"))


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with their tool calls in OpenAI's form, and with what rows leave out.

    That is: ids of calls, empty content next to calls, and id and name of the call that a message of role `tool`
    answers. Arguments stay an object or text. Keys with the value None are dropped. Raises UserError.
    """
    made: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        one = {key: value for key, value in message.items() if value is not None}
        if not one.get("tool_calls"):
            one.pop("tool_calls", None)
        if has_calls(one):
            one["content"] = one.get("content") or ""
            one["tool_calls"] = waiting = _checked_calls(one["tool_calls"])
        elif one.get("role") == "tool":
            named = [call for call in waiting if call["id"] == one.get("tool_call_id")]
            for call in (named or ([] if "tool_call_id" in one else waiting))[:1]:
                one = {"tool_call_id": call["id"], "name": call["function"]["name"], **one}
                waiting = [left for left in waiting if left is not call]
        made.append(one)
    return made


def _checked_calls(calls: Any) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise UserError(f"`tool_calls` must be a list of {_CALL_WORDS}", remedy="correct the row")
    return [_checked_call(one, index) for index, one in enumerate(calls)]


def _checked_call(call: Mapping[str, Any], index: int) -> Message:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise UserError(f"call {index + 1} of `tool_calls` does not have the form {_CALL_WORDS}")
    arguments = function.get("arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(_as_object(arguments), dict):
        raise UserError(
            f"the arguments of the call of `{name}` are not a JSON object",
            remedy="write an object, or the JSON text of one",
        )
    function = {"name": name, "arguments": arguments}
    return {"id": str(call.get("id") or call_id(index)), "type": "function", "function": function}


def _parsed(text: str) -> Any:
    """The value of JSON text; None: it is not JSON."""
    try:
        return loads_finite(text)
    except (ValueError, RecursionError):
        return None


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    return _parsed(arguments) if arguments.strip() else {}


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps(arguments, ensure_ascii=False)


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """Return checked messages with their calls in this form."""
    made = []
    numbered: dict[str, str] = {}
    for message in messages:
        one = dict(message)
        if has_calls(one):
            numbered = {call["id"]: call_id(index) for index, call in enumerate(one["tool_calls"])}
            one["tool_calls"] = [_call_in_form(call, numbered, form) for call in one["tool_calls"]]
        elif form.is_numbered and "tool_call_id" in one:
            one["tool_call_id"] = numbered.get(one["tool_call_id"], one["tool_call_id"])
        made.append(one)
    return made


def _call_in_form(call: Message, numbered: Mapping[str, str], form: CallForm) -> Message:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    written = _as_text(arguments) if form.has_text_arguments else _as_object(arguments)
    one_id = numbered[call["id"]] if form.is_numbered else call["id"]
    return {**call, "id": one_id, "function": {"name": name, "arguments": written}}


# ---------------------------------------------------------------- turns


class WrittenTurns:
    """The turns of a conversation whose text depends on the chat template: those with tool calls or reasoning.

    messages: the conversation in the form that the template takes. texts: what the assistant samples in such a turn,
    with its stop, by index of the message. Raises UserError for calls that the template cannot write.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Tools, stop: str, template: Template) -> None:
        self._tools, self._stop, self._template = tools, stop, template
        self.messages: list[Message] = [dict(one) for one in messages]
        self.texts: dict[int, str] = {}
        is_turn = [one.get("role") == "assistant" for one in messages]
        places = [at for at, one in enumerate(messages) if is_turn[at] and (has_calls(one) or one.get(REASONING))]
        if not places:
            return
        self.messages, written = self._in_its_form(checked_messages(messages), places)
        for place, rest in written.items():
            text = self._text(place, rest)
            if text is not None:
                self.texts[place] = text

    def opens_reasoning(self, place: int, given: str) -> bool:
        """Whether the text before a turn with calls opens reasoning that this turn does not close: calls in it would
        not be calls."""
        text = self.texts.get(place) if has_calls(self.messages[place]) else None
        ends = [closes for opens, closes in _REASONING_MARKS if given.rstrip().endswith(opens)]
        return text is not None and any(closes not in text for closes in ends)

    def _in_its_form(self, checked: Sequence[Message], places: Sequence[int]) -> tuple[list[Message], dict[int, str]]:
        """The messages in the first form of which the template writes all calls, and `_rest` of those at `places`."""
        rejections = []
        for form in FORMS:
            messages = in_form(checked, form)
            try:
                written = {place: self._rest(messages[place]) for place in places}
                if all(self._shows(messages[place], text, form) for place, text in written.items()):
                    return messages, written
            except UserError as error:
                rejections.append(error)
        if len(rejections) == len(FORMS):
            raise UserError(rejections[0].what, remedy=rejections[0].remedy or f"correct the row, or {NOT_WRITTEN}")
        raise UserError("the chat template does not render the tool calls of an assistant message", remedy=NOT_WRITTEN)

    def _shows(self, message: Message, text: str, form: CallForm) -> bool:
        """Whether the text of a turn has all its calls, with their arguments as JSON or one by one."""
        if not has_calls(message):
            return True
        words = Counter[str]()
        for function in (call["function"] for call in message["tool_calls"]):
            arguments = function["arguments"]
            words.update([function["name"], *_as_object(arguments)])
            wrong = _json_texts(arguments) if form.has_text_arguments else {str(arguments)} if arguments else set()
            if any(one in text for one in wrong):
                return False
        calls = text.replace(message["content"] or "\0", "", 1)
        return all(_count(calls, word) - _count(self._plain_answer, word) >= number for word, number in words.items())

    @functools.cached_property
    def _prompt(self) -> str:
        return self._template.chat_text([_USER], tools=self._tools)

    @functools.cached_property
    def _plain_answer(self) -> str:
        """`_rest` of an answer without calls."""
        return self._rest({"role": "assistant", "content": "-"})

    def _rest(self, message: Message) -> str:
        """The text of a turn and what the template writes after it. It is written as the first answer of a
        conversation, because some templates change earlier answers (Qwen3), or leave out markers after an earlier call
        (DeepSeek)."""
        whole = self._template.chat_text([_USER, message], is_whole=True, tools=self._tools)
        if whole.startswith(self._prompt):
            return whole[len(self._prompt) :]
        prompt = self._prompt.rstrip()  # Nemotron's opens reasoning, and a message without any has other white space
        if whole.startswith(prompt):
            return whole[len(prompt) :].lstrip()
        other = {"role": "assistant", "content": _PLACEHOLDER}  # the prompt may open reasoning: DeepSeek R1
        begins = self._template.chat_text([_USER, other], is_whole=True, tools=self._tools).partition(_PLACEHOLDER)[0]
        if not whole.startswith(begins):
            what = "the chat template does not write an assistant message with tool calls where other answers begin"
            raise UserError(what, remedy=NOT_WRITTEN)
        return whole[len(begins) :]

    def _text(self, place: int, text: str) -> str | None:
        """The text of a turn, of its `_rest`; None: it is only its content, because the template leaves its reasoning
        out."""
        message = self.messages[place]
        reasoning, content = str(message.get(REASONING) or ""), str(message.get("content") or "")
        if not has_calls(message) and _squeezed(reasoning) not in _squeezed(text):
            return None
        if _squeezed(content) not in _squeezed(text):
            raise UserError(
                "the chat template leaves out the `content` of an assistant message with tool calls",
                remedy="remove the `content`, because this chat template does not render it",
            )
        if not reasoning and not _EMPTY_REASONING.match(content):
            text = text[found.end() :] if (found := _EMPTY_REASONING.match(text)) else text
        return self._ended(place, text)

    def _ended(self, place: int, text: str) -> str:
        """The text up to its stop."""
        if not self._template.is_ended(text, self._stop, ""):
            text += self._end_after_one(place)
        said, found, _ = text.rpartition(self._stop)
        if not found:
            what = f"the chat template does not end an assistant message with {self._stop!r} if it has tool calls"
            raise UserError(what, remedy=NOT_WRITTEN)
        if self._stop in said:
            number = len(self.messages[place].get("tool_calls") or ())
            raise UserError(
                f"the chat template renders {self._stop!r} in the middle of an assistant message with "
                f"{number} tool calls",
                remedy="use fewer tool calls in one message, and remove this marker from its text",
            )
        return said + self._stop

    def _end_after_one(self, place: int) -> str:
        """Text that ends a message with one call in a template that writes it after the second one only (DeepSeek V3);
        then the message has its call twice in `messages`, so that the template goes on from this end."""
        message = self.messages[place]
        calls = message.get("tool_calls") or ()
        if len(calls) != 1:
            return ""
        twice = {**message, "tool_calls": [*calls, *calls]}
        once, both = self._rest(message), self._rest(twice)
        added = both[len(once) :] if both.startswith(once) else ""
        if self._stop not in added:
            return ""
        call = next(once[at:] for at in range(len(once) + 1) if once[at:] in added)
        self.messages[place] = twice
        return added.partition(call)[2] if call else ""


def _json_texts(text: str) -> set[str]:
    """The text as a JSON string."""
    return {json.dumps(text, ensure_ascii=is_ascii) for is_ascii in (False, True)}


def _count(text: str, word: str) -> int:
    """Occurrences of a word, plain or as part of a JSON string."""
    return max(text.count(one) for one in {word, *(quoted[1:-1] for quoted in _json_texts(word))})


def _squeezed(text: str) -> str:
    return "".join(text.split())
