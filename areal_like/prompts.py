"""Converts rows to prompt tokens, for rollout, evaluation and supervised training alike.

It applies the prompt template or the chat template and the rule for BOS. It adds nothing after the prompt (no EOS,
whatever the tokenizer's default is), and raises an error for a character that has no token.

Shape legend: P tokens of the prompt.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.config import AddBos
from areal_like.errors import UserError, first_line
from areal_like.tool_turns import WrittenTurns

CHAT_COLUMN = "_chat"
"""Column of a row with what its data source says of the chat template: {system_prompt, kwargs}, both optional."""
RESERVED_KWARGS = ("messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message")
"""Arguments of the chat template that are not a user's to give."""
PLACEHOLDER = "{prompt}"
"""Placeholder for the prompt in a prompt template."""
_MAX_CHARACTERS_SHOWN = 5
_MARK = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Matches DeepSeek's fullwidth bar in addition to the usual one."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a chat template goes on after a turn of the assistant.

    mark: the marker after the turn. tail: the text after it, up to the start of the assistant's next turn. begins_next:
    the marker is the first one of the next message, because the template writes none at the end of a turn (GLM).
    """

    mark: str
    tail: str
    begins_next: bool = False

    def after(self, stop: str) -> str:
        """The text after a turn that was sampled with this stop at its end; empty: it was truncated."""
        is_missing = not stop or (self.begins_next and stop != self.mark)
        return f"{self.mark}{self.tail}" if is_missing else self.tail


class PromptEncoder:
    """Converts data rows to prompt tokens.

    `tokenizer` is a Hugging Face tokenizer. `template`: text with {prompt}, or None for the chat template if the
    tokenizer has one. `chat_kwargs`: further arguments of the chat template. Raises UserError when settings contradict
    each other.
    """

    def __init__(
        self, tokenizer: Any, *, template: str | None, add_bos: AddBos, chat_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if template is not None and PLACEHOLDER not in template:
            raise UserError(
                f"the template does not contain {PLACEHOLDER}",
                where="rollout.prompt_template",
                remedy=f"add {PLACEHOLDER} to the template",
            )
        if add_bos == "always" and tokenizer.bos_token_id is None:
            raise UserError(
                "the tokenizer has no BOS token", where="rollout.add_bos", remedy="set add_bos to auto or never"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._add_bos = add_bos
        self._bos_id: int | None = tokenizer.bos_token_id
        self._tokenizer_adds_bos = _adds_bos(tokenizer)
        self._has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat_kwargs = dict(chat_kwargs or {})

    def for_row(self, row: Mapping[str, Any]) -> PromptEncoder:
        """The encoder with the chat template's arguments that the row's source gives; itself where there are none."""
        kwargs = _chat_of(row).get("kwargs")
        if not kwargs:
            return self
        return PromptEncoder(self._tokenizer, template=self._template, add_bos=self._add_bos, chat_kwargs=kwargs)

    def encode(self, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Prompt tokens [P] of a row, at least one. `tools`: declared to the policy by the chat template. Raises
        UserError for a row that cannot become a prompt."""
        row = self.with_system_prompt(row)
        if row.get("messages") is not None or tools:
            messages = row["messages"] if row.get("messages") is not None else [_as_message(row)]
            prompt_P = self._encode(self.chat_text(messages, tools=tools), is_chat=True)
        else:
            prompt_P = self._encode_text_of(row)
        if not prompt_P:
            raise UserError("the prompt is empty", remedy="remove the row, or correct data.columns")
        return prompt_P

    def with_system_prompt(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row with the system prompt of its source as the first of its messages. Raises UserError where there is no
        chat template."""
        chat = _chat_of(row)
        if chat and not self._has_chat_template:
            raise UserError(
                "data.*.system_prompt and chat_template_kwargs require a chat template, but the tokenizer has none",
                remedy="remove these settings, or set model.tokenizer to a tokenizer with a chat template",
            )
        text = chat.get("system_prompt")
        if text is None:
            return row
        messages = row["messages"] if row.get("messages") is not None else [_as_message(row)]
        return {**row, "messages": [{"role": "system", "content": text}, *messages]}

    def encode_turns(
        self, messages: Sequence[Mapping[str, Any]], stop: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[tuple[list[int], bool]]:
        """Tokens of a conversation in parts, each with whether the assistant wrote it.

        An assistant's turn is its unchanged content followed by `stop`, as a policy samples it; with tool calls or
        reasoning it is what the template writes (`tool_turns`). Between two turns is the text that the template puts
        after the `stop` of the first. `tools`: as in `encode`. Raises UserError if the template or a message does not
        allow that, or if the last turn is not the assistant's.
        """
        places = [index for index, one in enumerate(messages) if one.get("role") == "assistant"]
        if not places or places[-1] != len(messages) - 1 or places[0] == 0:
            what = "`messages` must not begin with an assistant message, and must end with one"
            raise UserError(what, remedy="correct or remove the row")
        turns = WrittenTurns(messages, tools, stop, self)
        parts: list[tuple[list[int], bool]] = []
        before = 0
        for place in places:
            given = turns.messages[:place]
            if before:
                text = self.continuation(given, before, [stop], tools)
                parts.append((self._ids(text), False))
            else:
                text = self.chat_text(given, tools=tools)
                parts.append((self._encode(text, is_chat=True), False))
            if turns.opens_reasoning(place, text):
                raise UserError(
                    "the chat template starts an assistant message with an opening reasoning marker, but this "
                    "message with tool calls contains no closing marker",
                    remedy="begin its `content` with the reasoning and the closing marker, such as </think>",
                )
            own = turns.texts.get(place) or _plain_content(turns.messages[place]) + stop
            parts.append((self._ids(own), True))
            before = place + 1
        return parts

    def between_turns(self, text: str, stop: str) -> list[int] | None:
        """Tokens between an assistant's turn that ends in `stop` and the next one, with `text` as the user's message;
        None if prompts do not use the chat template. Special tokens in `text` are split by a space, so that an
        environment's text cannot forge turns of a conversation. Raises UserError as in `encode_turns`."""
        if not self._has_chat_template or self._template is not None:
            return None
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
        messages = [*before, {"role": "user", "content": self.plain(text)}]
        return self._ids(self.continuation(messages, len(before), [stop]))

    def after_calls(
        self, called: Mapping[str, Any], results: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> list[int]:
        """Tokens between an assistant's turn with tool calls and the next one.

        Args:
            called: a message of the assistant with such calls; it is not part of the tokens.
            results: the messages of role `tool` that follow it. Special tokens in their texts are split by a space, so
                that a result cannot forge turns of a conversation.
            stops: as in `continuation`.

        Raises:
            UserError: as in `encode_turns`, and if there is no chat template.
        """
        before = [{"role": "user", "content": "-"}, called]
        plain = [{key: self.plain(value) for key, value in one.items()} for one in results]
        return self._ids(self.continuation([*before, *plain], len(before), stops))

    def plain(self, text: str) -> str:
        """Text without markers of the tokenizer that could begin or end a turn: each is split by a space.

        Such markers are the special tokens, and added tokens of the form `<|...|>`, which some tokenizers do not mark
        as special. Others, such as `<think>`, only occur within a turn, and people write them in prompts.

        Example:
            `a<|im_end|>b` becomes `a< |im_end|>b`.
        """
        for mark in self._turn_marks:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        return text

    @functools.cached_property
    def _turn_marks(self) -> tuple[str, ...]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        marks = [str(one) for one in added if one.special or _MARK.fullmatch(str(one))]
        return tuple(mark for mark in marks if len(mark) > 1)

    def continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        covered: int,
        stops: Sequence[str],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Text after the first `covered` messages, the last of which is the assistant's, up to the start of its next
        turn. The turn ended with the first one of `stops`; see `turn_end`."""
        return self.turn_end(messages, covered, stops, tools).after(stops[0])

    def turn_end(
        self,
        messages: Sequence[Mapping[str, Any]],
        covered: int,
        stops: Sequence[str],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> TurnEnd:
        """How the template goes on after the first `covered` messages, the last of which is the assistant's.

        `stops`: special tokens that may end a turn, of which the template's own is found: a policy may have ended its
        turn with another one. Raises UserError as in `encode_turns`, and if the text of the template does not show
        where the turn ends.
        """
        whole = self.chat_text(messages[:covered], is_whole=True, tools=tools)
        full = self.chat_text(messages, tools=tools)
        content = str(messages[covered - 1].get("content") or "").strip()
        ending = [stop for stop in stops if self.is_ended(whole, stop, content)]
        for stop in ending:
            parts = full.split(stop, number := whole.count(stop))
            if len(parts) > number:
                return TurnEnd(stop, parts[number])
        for stop in ending:  # gpt-oss: the last message ends with another marker than earlier ones
            place = whole.rindex(stop)
            if (mark := _first_of(stops, full[place:])) and full[:place] == whole[:place]:
                return TurnEnd(mark, full[place + len(mark) :])
        place = len(whole.rstrip())
        rest = full[place:].lstrip()
        if not ending and (mark := _first_of(stops, rest)) and full[:place] == whole[:place]:
            return TurnEnd(mark, rest[len(mark) :], begins_next=True)
        raise UserError(
            f"the chat template does not end the assistant's turns with {' or '.join(map(repr, stops))}",
            remedy="use rows with `spans` instead of `messages`",
        )

    def is_ended(self, text: str, stop: str, content: str) -> bool:
        """Whether the last `stop` of a rendered conversation ends its last message, which has this content: after it
        are at most fixed text and the tokenizer's end of sequence."""
        _, found, after = text.rpartition(stop)
        after = after.replace(getattr(self._tokenizer, "eos_token", None) or "", "")
        is_fixed = not any(mark in after for mark in self._turn_marks)
        return bool(found) and is_fixed and not (content and content in after)

    def _ids(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text, what="the messages")

    def _encode_text_of(self, row: Mapping[str, Any]) -> list[int]:
        text = row.get("prompt")
        if not isinstance(text, str):
            raise UserError(
                f"a row needs `prompt` (text) or `messages` (a list); this row has {sorted(row)}",
                remedy="map your columns in data.columns",
            )
        if not text.strip():
            raise UserError("the prompt is empty", remedy="remove the row, or correct data.columns")
        if self._template is not None:
            return self._encode(self._template.replace(PLACEHOLDER, text), is_chat=False)
        if self._has_chat_template:
            return self._encode(self.chat_text([{"role": "user", "content": text}]), is_chat=True)
        return self._encode(text, is_chat=False)

    def chat_text(self, messages: Any, *, is_whole: bool = False, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Apply the chat template to messages. `is_whole`: the conversation ends with its last message; otherwise the
        prompt for the assistant's next turn is added. Raises UserError if there is no template, or if it rejects the
        messages."""
        if not self._has_chat_template:
            raise UserError(
                "`messages` and tools require a chat template, but the tokenizer has none",
                remedy="use a `prompt` column without tools, or a tokenizer with a chat template",
            )
        is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
        if not is_list or not all(isinstance(one, Mapping) and "role" in one and "content" in one for one in messages):
            raise UserError("`messages` must be a non-empty list of mappings with `role` and `content`")
        is_continuation = messages[-1]["role"] == "assistant"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(one) for one in messages],
                    tools=[dict(one) for one in tools] or None,
                    **self._chat_kwargs,
                    tokenize=False,
                    add_generation_prompt=not is_continuation,
                    continue_final_message=is_continuation and not is_whole,
                )
            )
        except Exception as error:  # the template is a program of the model's author and may raise anything
            raise UserError(f"the chat template rejected the messages ({first_line(error)})") from error

    def _encode(self, text: str, *, is_chat: bool) -> list[int]:
        """Tokens of `text` with BOS as configured. A chat template writes its own BOS, so `auto` adds none to its
        text.
        """
        ids = encode_text(self._tokenizer, text, what="the prompt")
        if self._bos_id is None:
            return ids
        body = list(itertools.dropwhile(lambda token: token == self._bos_id, ids))
        by_itself = len(body) < len(ids) or (self._tokenizer_adds_bos and not is_chat)
        wants_bos = self._add_bos == "always" or (self._add_bos == "auto" and by_itself)
        return [self._bos_id, *body] if wants_bos and body else body


def prompt_text(row: Mapping[str, Any]) -> str:
    """The text of a row's prompt, or of all its messages."""
    if isinstance(prompt := row.get("prompt"), str):
        return prompt
    messages = row.get("messages")
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)] if messages else []
    return "\n".join(text for text in contents if isinstance(text, str))


def _first_of(marks: Sequence[str], text: str) -> str:
    """The marker with which the text begins; empty: none."""
    return next((mark for mark in marks if text.startswith(mark)), "")


def _chat_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return row.get(CHAT_COLUMN) or {}


def _as_message(row: Mapping[str, Any]) -> dict[str, Any]:
    text = row.get("prompt")
    if not isinstance(text, str):
        raise UserError("a row needs `prompt` (text) or `messages`", remedy="map your columns in data.columns")
    if not text.strip():
        raise UserError("the prompt is empty", remedy="remove the row, or correct data.columns")
    return {"role": "user", "content": text}


def _plain_content(message: Mapping[str, Any]) -> str:
    if not isinstance(message.get("content"), str) or not message["content"]:
        raise UserError(
            "the `content` of an assistant message must be non-empty text", remedy="remove the row or this message"
        )
    return message["content"]


def encode_text(tokenizer: Any, text: str, *, what: str) -> list[int]:
    """Tokens of the unchanged `text`, without special tokens. Raises UserError with `what` and the characters that have
    no token."""
    try:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    except Exception as error:  # tokenizers raise bare Exception, e.g. for a character they have no token for
        shown = [
            repr(one) for one in itertools.islice(_characters_without_token(tokenizer, text), _MAX_CHARACTERS_SHOWN)
        ]
        reason = f"it has no token for {', '.join(shown)}" if shown else first_line(error)
        raise UserError(
            f"the tokenizer cannot encode {what}: {reason}",
            remedy="correct the row, or set model.tokenizer to a different tokenizer",
        ) from error


def _characters_without_token(tokenizer: Any, text: str) -> Iterator[str]:
    for character in dict.fromkeys(text):
        try:
            tokenizer.encode(character, add_special_tokens=False)
        except Exception:  # whatever it raises, it cannot encode this character
            yield character


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer adds a BOS to plain text by default."""
    if tokenizer.bos_token_id is None:
        return False
    return list(tokenizer.encode("", add_special_tokens=True))[:1] == [tokenizer.bos_token_id]
