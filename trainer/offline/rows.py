"""Reads and checks rows in TRL's data set formats. Imports no torch.

It defines the formats, the required fields, and the error messages. Tokens are computed in encoding.py, JSON is read in
trainer/data/rows_file.py.

A text is either plain, or conversational: a list of {role, content}, in which an assistant message may have
`tool_calls`. A conversational row may have `tools`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.tool_turns import checked_messages, checked_tools, has_calls
from trainer.data.rows_file import read_objects
from trainer.offline.config import Objective

Messages = Sequence[Mapping[str, Any]]
DEMONSTRATIONS = "{prompt, completion} or {messages}"
PAIRS = "{prompt, chosen, rejected}"


@dataclass(frozen=True)
class Demonstration:
    """A row to imitate. fields: input of trainer.sft.ExampleEncoder. num_given: see there."""

    where: str
    fields: dict[str, Any]
    num_given: int = 0


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Read rows for supervised training. Raises UserError naming the line that cannot be used."""
    return [_demonstration(where, row) for where, row in read_objects(path, row_words=DEMONSTRATIONS)]


def _demonstration(where: str, row: Mapping[str, Any]) -> Demonstration:
    if "messages" in row and "completion" not in row:
        messages = _checked_messages(row["messages"], "messages", where)
        if messages[-1]["role"] != "assistant":
            raise UserError("`messages` does not end with an assistant message", where=where, remedy="remove the row")
        return Demonstration(where, {"messages": messages, **_tools(row, where)})
    for key in ("prompt", "completion"):
        if row.get(key) is None:
            raise UserError(f"the row has no `{key}`", where=where, remedy=f"use rows of the form {DEMONSTRATIONS}")
    return _continued(where, row, row["prompt"], row["completion"], "completion")


def _continued(where: str, row: Mapping[str, Any], prompt: Any, answer: Any, key: str) -> Demonstration:
    """Combine a row's prompt and its continuation, which alone is trained on. Raises UserError."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise UserError(f"`{key}` is empty", where=where, remedy="remove the row")
        return Demonstration(where, {"prompt": prompt, "response": answer})
    if isinstance(prompt, str) or isinstance(answer, str):
        what = f"`prompt` and `{key}` are of different types"
        raise UserError(what, where=where, remedy="write both columns as text, or both as lists of {role, content}")
    given = _checked_messages(prompt, "prompt", where)
    messages = _checked_messages(answer, key, where)
    if messages[-1]["role"] != "assistant":
        raise UserError(f"`{key}` does not end with an assistant message", where=where, remedy="remove the row")
    return Demonstration(where, {"messages": [*given, *messages], **_tools(row, where)}, len(given))


def _checked_messages(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    """Check for a list of {role, content} with at least one entry, in which an assistant message with `tool_calls` may
    have no content. Raises UserError."""
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not all(isinstance(one, dict) and _is_message(one) for one in value):
        what = f"`{key}` is not a list of {{role, content}}"
        raise UserError(what, where=where, remedy="use text, or a list of messages")
    try:
        checked_messages(value)
    except UserError as error:
        raise UserError(error.what, where=where, remedy=error.remedy or "correct the row") from error
    return [{**one, "content": one.get("content") or ""} for one in value]


def _is_message(one: Mapping[str, Any]) -> bool:
    is_text = isinstance(one.get("content"), str) or (has_calls(one) and one.get("content") is None)
    return is_text and isinstance(one.get("role"), str)


def _tools(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row's `tools`, if it has any. Raises UserError."""
    try:
        tools = checked_tools(row.get("tools"))
    except UserError as error:
        raise UserError(error.what, where=where, remedy=error.remedy) from error
    return {"tools": tools} if tools else {}


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each as a demonstration."""

    where: str
    chosen: Demonstration
    rejected: Demonstration


def read_pairs(path: Path) -> list[Pair]:
    """Read rows with preferences. Raises UserError naming the line that cannot be used."""
    return [_pair(where, row) for where, row in read_objects(path, row_words=PAIRS)]


def _pair(where: str, row: Mapping[str, Any]) -> Pair:
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise UserError(f"the row has no `{key}`", where=where, remedy=f"use rows of the form {PAIRS}")
    chosen, rejected = row["chosen"], row["rejected"]
    if chosen == rejected:
        raise UserError("`chosen` and `rejected` are equal", where=where, remedy="remove the row")
    prompt = row.get("prompt")
    if prompt is None:
        prompt, chosen, rejected = _common_prompt(chosen, rejected, where)
    return Pair(
        where, _continued(where, row, prompt, chosen, "chosen"), _continued(where, row, prompt, rejected, "rejected")
    )


def _common_prompt(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """Split two full conversations into the messages that they share, and the rest of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise UserError("the row has no `prompt`", where=where, remedy=f"use rows of the form {PAIRS}")
    num_shared = next(
        (place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    if num_shared == 0:
        what = "`chosen` and `rejected` have no message in common, and there is no `prompt`"
        raise UserError(what, where=where, remedy="add a `prompt`")
    return chosen[:num_shared], chosen[num_shared:], rejected[num_shared:]


def objective_of(path: Path) -> Objective:
    """Return the objective that the columns of the first row are for: `dpo`, which reads the same rows as
    `reward_model`, or `sft`. Raises UserError if there are no rows.
    """
    first = read_objects(path, row_words=f"{DEMONSTRATIONS} or {PAIRS}")[0].row
    return "dpo" if "chosen" in first or "rejected" in first else "sft"


def check_file(objective: Objective, path: Path) -> None:
    """Raise UserError if a row of the file cannot be used for `objective`."""
    if objective == "sft":
        read_demonstrations(path)
    else:
        read_pairs(path)
