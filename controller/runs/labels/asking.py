"""`areal-like data answers`: asks an external model about each row, several times, and writes a file of answers.

`areal-like data labels` compares such a file with the labels, and `areal-like score` scores it, which evaluates the
model. Requests, budget and recorded answers are in areal_like/external/. Every answer is recorded next to the file when
it arrives: an interrupted command is repeated, and asks only for what is missing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, UserError
from areal_like.external.chat import CHAT, ChatChoice, chat_choice
from areal_like.external.client import ModelClient
from areal_like.external.errors import ExternalError
from areal_like.external.settings import ExternalModelOptions
from controller.preflight.dataset.cleaning import opened
from controller.preflight.dataset.port import Row
from controller.preflight.dataset.reading import find_sources, parse

WHERE = "areal-like data answers"


@dataclass(frozen=True)
class Asking:
    """What to ask. num_answers: of each row; max_tokens: longest answer, in the model's tokens."""

    files: Sequence[str]
    target: Path
    options: ExternalModelOptions
    columns: Mapping[str, str | None]
    num_answers: int
    temperature: float
    max_tokens: int


@dataclass
class Asked:
    """What was done. first_failure: why the first request without an answer has none."""

    num_rows: int = 0
    num_answers: int = 0
    num_failed: int = 0
    first_failure: str = ""


class _Answers:
    """Asks and writes; `run` once."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self.done = asking, Asked()
        limit = asking.options.max_concurrency
        self._client = ModelClient(asking.options, CHAT, WHERE, max_concurrency=limit)
        self._questions = self._each_question()
        self._waiting: dict[int, bytes] = {}
        """Lines of answers that came before an earlier one, by number; empty for a request without an answer."""
        self._num_written = 0

    async def run(self) -> dict[str, float]:
        """Ask until the end of the rows; return the client's counters. Raises UserError, OSError."""
        part = self._asking.target.with_name(self._asking.target.name + ".part")
        try:
            with part.open("wb") as file:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self._asking.options.max_concurrency):
                        tasks.create_task(self._lane(file))
            part.replace(self._asking.target)
        finally:
            part.unlink(missing_ok=True)
            await self._client.close()
        return self._client.counters()

    def _each_question(self) -> Iterator[tuple[int, Row, int]]:
        """Number of the question, row, and number of the answer in its row."""
        lines, columns = opened(find_sources(self._asking.files), self._asking.columns, needs_answer=False)
        question = 0
        for number, line in enumerate(lines, 1):
            fields, fault = parse(line)
            row = Row(number, line.where, fields, columns)
            if fault or not row.prompt:
                what = fault or "the row has no prompt"
                raise UserError(
                    what, where=line.where, remedy="run `areal-like data clean`, which removes invalid rows"
                )
            self.done.num_rows += 1
            for answer in range(self._asking.num_answers):
                yield question, row, answer
                question += 1

    async def _lane(self, file: Any) -> None:
        for number, row, answer in self._questions:
            self._waiting[number] = await self._line(row, answer)
            while (line := self._waiting.pop(self._num_written, None)) is not None:
                file.write(line)
                self._num_written += 1

    async def _line(self, row: Row, answer: int) -> bytes:
        asking, options = self._asking, self._asking.options
        body: dict[str, Any] = {
            "messages": _messages(row, options.system), "temperature": asking.temperature,
            options.max_tokens_key: asking.max_tokens,
        }  # fmt: skip
        if options.send_seed:
            body["seed"] = answer
        try:
            choice, usage = await self._client.ask(body, self._read, salt=answer)
        except ExternalError as error:
            self.done.num_failed += 1
            self.done.first_failure = self.done.first_failure or f"{row.where}: {error}"
            return b""
        self.done.num_answers += 1
        made = usage.get("completion_tokens") if isinstance(usage, dict) else None
        fields = {
            **({"id": row.fields["id"]} if row.fields.get("id") is not None else {}),
            "where": row.where, "prompt": row.prompt, "response": choice.message.content or "",
            **({"gold": row.answer} if row.answer else {}),
            "finish_reason": "length" if choice.finish_reason == "length" else "stop", "model": options.model,
            **({"num_tokens": made} if isinstance(made, int) else {}),
        }  # fmt: skip
        return json.dumps(fields).encode() + b"\n"

    def _read(self, reply: Any) -> tuple[ChatChoice, Any]:
        """The choice, and the counts of tokens as the endpoint gives them. Raises RequestRefused."""
        return chat_choice(reply, self._client.shown_url), reply.get("usage")


def _messages(row: Row, system: str | None) -> list[dict[str, Any]]:
    """The conversation of a row, or its prompt as one message."""
    value = row.columns.value(row.fields, row.columns.prompt)
    if isinstance(value, list):
        messages = [dict(one) for one in value if isinstance(one, Mapping)]
    else:
        messages = [{"role": "user", "content": row.prompt}]
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def write_answers(asking: Asking) -> tuple[Asked, dict[str, float]]:
    """Ask about all rows and write the file; return what was done, and the client's counters.

    Raises:
        UserError: files, options or the endpoint cannot be used, or the budget is used up; the target does not exist.
        OperationError: the target cannot be written, or no request had an answer.
    """
    if asking.target.exists():
        raise UserError(
            "the file already exists",
            where=str(asking.target),
            remedy="choose a different file, or remove the existing one",
        )
    if asking.options.api != "chat":
        raise UserError(
            f"the option api={asking.options.api} is not supported by this command",
            where=WHERE,
            remedy="remove this option",
        )
    answers = _Answers(asking)
    try:
        counters = asyncio.run(answers.run())
    except ExceptionGroup as group:
        raise _first(group) from group
    except OSError as error:
        raise OperationError(
            f"{error.filename or asking.target} cannot be read or written: {error.strerror or error}"
        ) from error
    if not answers.done.num_answers:
        asking.target.unlink(missing_ok=True)
        raise OperationError(f"no request was answered: {answers.done.first_failure or 'there are no rows'}")
    return answers.done, counters


def _first(group: ExceptionGroup[Exception]) -> Exception:
    found: Exception = group
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    if isinstance(found, OSError):
        return OperationError(f"{found.filename or 'the file'} cannot be read or written: {found.strerror or found}")
    return found
