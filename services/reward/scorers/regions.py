r"""Converts sets of real numbers in various notations to intervals.

It handles inequalities, unions of them, set-builder notation and `x \in ...`. Comparison is in maths.py. Texts come
from `normal` in notation.py.
"""

from __future__ import annotations

import re

_SIGN = r"(<|>|\\(?:le|ge|lt|gt|ne)(?![a-zA-Z]))"
_LETTER = r"[a-zA-Z](?:_\{?\w\}?)?"
_ONE_SIDED = re.compile(rf"\(?\s*{_LETTER}\s*{_SIGN}\s*([^<>=]+?)\s*\)?")
_TURNED = re.compile(rf"\(?\s*([^<>=]+?)\s*{_SIGN}\s*{_LETTER}\s*\)?")
_TWO_SIDED = re.compile(rf"([^<>=]+?)\s*{_SIGN}\s*{_LETTER}\s*{_SIGN}\s*([^<>=]+)")
_COMPARISON = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?![a-zA-Z])")
_MEMBER = re.compile(rf"{_LETTER}\s*\\in\s*(.+)", re.DOTALL)
_BUILDER = re.compile(
    rf"\\\{{\s*{_LETTER}\s*(?:\\in\s*\\(?:mathbb|mathbf|bf)\s*\{{?\s*R\s*\}}?\s*)?(?:\\mid|\\vert|\||:|\\colon)"
    r"\s*(.+?)\s*\\\}",
    re.DOTALL,
)
_OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\\(?:lor|vee|cup)(?![a-zA-Z])|(?<![a-zA-Z\\])or(?![a-zA-Z]))\s*", re.I)
_TURN = {"<": ">", ">": "<", r"\lt": ">", r"\gt": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_ALL = re.compile(r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*R\s*\}?")


def as_interval(text: str) -> str:
    r"""Convert an inequality in one letter to an interval (`x \le 3`: `(-\infty, 3]`); any other text is unchanged."""
    text = text.strip().strip("$").strip()
    if (builder := _BUILDER.fullmatch(text)) is not None and _COMPARISON.search(builder.group(1)):
        text = builder.group(1)
    if (member := _MEMBER.fullmatch(text)) is not None:
        text = member.group(1).strip()
    if _ALL.fullmatch(text):
        return r"(-\infty, \infty)"
    if not _COMPARISON.search(text):
        return text
    parts = [_interval(part) for part in _OR.split(text)]
    return text if None in parts else r" \cup ".join(part for part in parts if part is not None)


def _interval(text: str) -> str | None:
    """The interval of one inequality, or None for any other text."""
    if (match := _TWO_SIDED.fullmatch(text)) is not None and not _is_compared(match[1] + " " + match[4]):
        low, left, right, high = match.groups()
        if left in (">", r"\gt", r"\ge") and right in (">", r"\gt", r"\ge"):
            low, left, right, high = high, _TURN[right], _TURN[left], low
        if left not in ("<", r"\lt", r"\le") or right not in ("<", r"\lt", r"\le"):
            return None
        return ("[" if left == r"\le" else "(") + f"{low}, {high}" + ("]" if right == r"\le" else ")")
    if (match := _ONE_SIDED.fullmatch(text)) is not None and not _is_compared(match[2]):
        sign, end = match.groups()
    elif (match := _TURNED.fullmatch(text)) is not None and not _is_compared(match[1]):
        end, sign = match[1], _TURN[match[2]]
    else:
        return None
    return {
        "<": rf"(-\infty, {end})", r"\lt": rf"(-\infty, {end})", r"\le": rf"(-\infty, {end}]",
        ">": rf"({end}, \infty)", r"\gt": rf"({end}, \infty)", r"\ge": rf"[{end}, \infty)",
        r"\ne": rf"(-\infty, {end}) \cup ({end}, \infty)",
    }[sign]  # fmt: skip


def _is_compared(text: str) -> bool:
    return _COMPARISON.search(text) is not None
