"""Reads a JSONL file of rows, with the line number of each. Imports no torch.

What a row must have is checked in trainer/sft.py and trainer/offline/rows.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.errors import UserError
from areal_like.regular_file import check_regular


class Line(NamedTuple):
    """One row and its location, as `file:line`."""

    where: str
    row: dict[str, Any]


def read_objects(path: Path, *, row_words: str) -> list[Line]:
    """Read the rows of a JSONL file; empty lines are skipped.

    Args:
        path: UTF-8 text, one JSON object a line.
        row_words: description of a row, such as `{prompt, response}`, for messages.

    Raises:
        UserError: the file cannot be read, has no rows, or a line is not a JSON object.
    """
    check_regular(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a string may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the file cannot be read ({error})", where=str(path), remedy="specify a readable JSONL file in UTF-8"
        ) from error
    found = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(
                "the line is not valid JSON", where=where, remedy="write one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise UserError("the line is not a JSON object", where=where, remedy=f"use rows of the form {row_words}")
        found.append(Line(where, row))
    if not found:
        remedy = f"use rows of the form {row_words}, one JSON object per line"
        raise UserError("the file contains no rows", where=str(path), remedy=remedy)
    return found
