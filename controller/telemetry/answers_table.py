"""Converts the answers in an evaluation's row to a table, for sinks that show tables.

The answers are chosen in eval_answers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "eval/answers"
COLUMNS = ("version", "row", "prompt", "answer", "value")


def answers_table(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A table {name, version, time_s, columns, data}; None for a row without answers."""
    answers = record.get("answers") if record.get("kind") == "eval" else None
    if not answers:
        return None
    data = [[record["version"], *(one.get(name) for name in COLUMNS[1:])] for one in answers]
    return {
        "name": NAME, "version": record["version"], "time_s": record["time_s"], "columns": list(COLUMNS), "data": data,
    }  # fmt: skip


def as_markdown(table: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    lines = [list(table["columns"]), ["---"] * len(table["columns"]), *table["data"]]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>").replace("`", "\\`")
