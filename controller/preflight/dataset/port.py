"""The interface of stages, and the row that a stage reads.

A stage is a name, options checked by pydantic, and a decision about each row. `RowStage` decides from the row alone and
runs in several processes. `SetStage` also needs the rows before it: `sketch` makes what it needs of one row, in several
processes, and `decide` compares it with what is remembered, in one process and in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from areal_like.settings import Settings
from controller.data.table import final_answer
from controller.preflight.dataset.columns import RESULT_MARKS, Columns
from controller.preflight.dataset.text import tokens


@dataclass(frozen=True)
class Finding:
    """Why a row is removed. reason: one of a few fixed texts, which are counted; evidence: what was found in this row,
    in one line."""

    reason: str
    evidence: str = ""


@dataclass(frozen=True)
class Row:
    """One row. number: from 1, over all files; where: file and line; fault: why the line cannot be read, else empty."""

    number: int
    where: str
    fields: Mapping[str, Any]
    columns: Columns
    fault: str = ""

    @cached_property
    def prompt(self) -> str:
        """Text of the prompt; of a conversation the contents of all messages, one after the other."""
        return text_of(self.columns.value(self.fields, self.columns.prompt))

    @cached_property
    def prompt_tokens(self) -> list[str]:
        """Tokens of the prompt (text.py)."""
        return tokens(self.prompt)

    @cached_property
    def answer(self) -> str:
        """The final answer that a response is compared with, extracted as for training; empty if there is none."""
        found = final_answer(self.columns.value(self.fields, self.columns.answer))
        return found if isinstance(found, str) else ""

    @cached_property
    def stated_answer(self) -> str:
        r"""An answer in a column of its own, as opposed to one within a solution (after `####`, in `\boxed{}`)."""
        for name in self.columns.answers:
            value = self.columns.value(self.fields, name)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                continue
            text = str(value).strip()
            if text and not any(mark in text for mark in RESULT_MARKS):
                return text
        return ""

    @cached_property
    def solution(self) -> str:
        r"""Text of a solution with a final result (after `####`, in `\boxed{}`); empty if there is none."""
        for name in self.columns.solutions:
            value = self.columns.value(self.fields, name)
            if isinstance(value, str) and any(mark in value for mark in RESULT_MARKS):
                return value
        return ""

    @cached_property
    def texts(self) -> list[tuple[str, str]]:
        """(column, text) of every text in the row, those of nested values included."""
        return [(name, text) for name, value in self.fields.items() for text in _texts(value)]


def text_of(value: Any) -> str:
    """The text of a prompt: itself, or the contents of its messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [_content(message.get("content")) for message in value if isinstance(message, Mapping)]
        return "\n".join(part for part in parts if part)
    return ""


def _content(value: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


class NoOptions(Settings):
    """Options of a stage that has none."""


OptionsT = TypeVar("OptionsT", bound=Settings)


class Stage(Generic[OptionsT]):
    """Base of both kinds of stage. `options` is an instance of `Options`."""

    name: ClassVar[str] = ""
    Options: ClassVar[type[Settings]] = NoOptions
    is_private: ClassVar[bool] = False
    """Examples of removed rows in reports must not show the row's text."""

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def prepare(self) -> None:
        """Load libraries and files; called once in each process. Raises UserError."""


class RowStage(Stage[OptionsT]):
    """A stage that decides from the row alone."""

    def check(self, row: Row) -> Finding | None:
        """Why the row is removed, or None."""
        raise NotImplementedError


class SetStage(Stage[OptionsT]):
    """A stage that compares a row with earlier ones."""

    def sketch(self, row: Row) -> Any:
        """What `decide` needs of the row; None: the row is kept. Sent between processes, so it should be small."""
        raise NotImplementedError

    def open(self) -> None:
        """Prepare to remember rows; called once, in the process that decides."""

    def decide(self, number: int, where: str, sketch: Any) -> Finding | None:
        """Why the row is removed, or None; a row that is kept is remembered. Called in the order of the rows."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what was remembered."""
