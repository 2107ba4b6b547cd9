r"""Stage `schema`: rows that cannot be read or used, and damaged texts.

Unreadable lines, a missing, empty or wrongly typed prompt or answer, characters that are traces of a wrong encoding,
and markup that is opened but not closed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal_like.settings import Settings
from controller.preflight.dataset.port import Finding, Row, RowStage

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH = "\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
"""Bytes 80 to BF, of which all but the first of a character consist, in Latin-1 and Windows-1252."""
_MISREAD = re.compile(f"[ÂÃÎÏÐÑ][{_HIGH}]|[âã][{_HIGH}][{_HIGH}]|ï»¿")
"""UTF-8 that was decoded as Latin-1 or Windows-1252."""
_SIGN = re.compile(r"\\\\|\\.|[{}]", re.DOTALL)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{(\w+\*?)\}")
_DRAWING = re.compile(r"\[(/?)asy\]")
_DOLLAR = re.compile(r"(?<!\\)(?:\\\\)*\$")


class SchemaOptions(Settings):
    """Options of stage `schema`."""

    markup: bool = True
    """Check that braces, environments and formulas in LaTeX, and blocks of program text, are closed in prompts and
    solutions."""


class Schema(RowStage[SchemaOptions]):
    """See the module."""

    name = "schema"
    Options = SchemaOptions

    def check(self, row: Row) -> Finding | None:
        if row.fault:
            return Finding("unreadable line", row.fault)
        columns = row.columns
        found = _prompt_fault(columns.value(row.fields, columns.prompt), columns.prompt)
        if found is None and columns.answer is not None:
            found = _answer_fault(columns.value(row.fields, columns.answer), columns.answer)
            if found is None and not row.answer:
                found = Finding("empty answer", f"`{columns.answer}` has no final answer")
        if found is not None:
            return found
        for name, text in row.texts:
            if (damage := _damage(text, name)) is not None:
                return damage
        if not self.options.markup:
            return None
        for name, text in (("prompt", row.prompt), ("solution", row.solution)):
            if fault := unclosed(text):
                return Finding("unbalanced markup", f"{name}: {fault}")
        return None


def _prompt_fault(value: Any, name: str) -> Finding | None:
    if value is None:
        return Finding("missing prompt", f"no `{name}`")
    if isinstance(value, list):
        if not value:
            return Finding("empty prompt", f"`{name}` has no messages")
        for message in value:
            is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
            if not is_message:
                return Finding("wrong type", f"a message in `{name}` has no role or no content")
        return None
    if not isinstance(value, str):
        return Finding("wrong type", f"`{name}` is {type(value).__name__}, not text or messages")
    return None if value.strip() else Finding("empty prompt", f"`{name}` is empty")


def _answer_fault(value: Any, name: str) -> Finding | None:
    if value is None:
        return Finding("missing answer", f"no `{name}`")
    if isinstance(value, bool | dict | list):
        return Finding("wrong type", f"`{name}` is {type(value).__name__}, not text or a number")
    return None if str(value).strip() else Finding("empty answer", f"`{name}` is empty")


def _damage(text: str, name: str) -> Finding | None:
    if text.isascii():
        found = _CONTROL.search(text)
        return None if found is None else _at(found, name, "control character")
    for pattern, reason in (
        (_SURROGATE, "an unpaired surrogate"),
        (re.compile("\ufffd"), "replacement character"),
        (_MISREAD, "wrong encoding"),
        (_CONTROL, "control character"),
    ):
        if (found := pattern.search(text)) is not None:
            return _at(found, name, reason)
    return None


def _at(found: re.Match[str], name: str, reason: str) -> Finding:
    return Finding(reason, f"character {found.start() + 1} of `{name}`: {ascii(found[0])[1:-1]}")


def unclosed(text: str) -> str:
    """Which markup in a text is not balanced, or an empty text."""
    if text.count("```") % 2:
        return "a code block (```) is not closed"
    if "[asy]" in text or "[/asy]" in text:
        marks = [found[1] for found in _DRAWING.finditer(text)]
        if marks != ["", "/"] * (len(marks) // 2):
            return "[asy] and [/asy] do not match"
        text = re.sub(r"\[asy\].*?\[/asy\]", " ", text, flags=re.DOTALL)  # a program, not LaTeX
    if "```" in text or not _COMMAND.search(text):  # braces and dollar signs are markup only in LaTeX
        return ""
    depth = 0
    for sign in _SIGN.findall(text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return "`}` without `{`"
    if depth:
        return "`{` is not closed"
    opened: list[str] = []
    for kind, name in _ENVIRONMENT.findall(text):
        if kind == "begin":
            opened.append(name)
        elif not opened or opened.pop() != name:
            return f"\\end{{{name}}} without \\begin{{{name}}}"
    if opened:
        return f"\\begin{{{opened[-1]}}} is not ended"
    return "a formula ($) is not closed" if len(_DOLLAR.findall(text)) % 2 else ""
