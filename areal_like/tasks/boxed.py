r"""Finds the content of `\boxed{...}`, the usual mark of a final answer in mathematics, in solutions and responses."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_BOXES = 20
"""Largest number of unclosed boxes that are skipped, from the end, since a response may consist only of boxes."""
_BETWEEN = re.compile(
    r"(?:[\s$,;.]|\\[()\[\],;]|\\quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or|maybe|also)\b)*", re.IGNORECASE
)
"""Text that may occur between boxes that together are one answer."""
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*([^\s{}$\\]+)")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` (or `\fbox`), braces balanced; else of the last bare `\boxed 5`.

    None if there is neither; "" for an empty box.
    """
    boxes = _complete_boxes(text)
    if boxes:
        return boxes[-1][2]
    bare: list[str] = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def final_boxes(text: str) -> list[str]:
    r"""The boxes that end a text, in order: of `\boxed{1} or \boxed{2}` both; with words between them, the last one.

    [] if there is none.
    """
    boxes = _complete_boxes(text)
    if not boxes:
        last = last_boxed(text)
        return [] if last is None else [last]
    found = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _BETWEEN.fullmatch(text, box[1], found[0][0]):
            break
        found.insert(0, box)
    return [content for _, _, content in found]


def _complete_boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the innermost complete boxes among the last ones, in order."""
    boxes: list[tuple[int, int, str]] = []
    for match in reversed(list(_BOX.finditer(text))[-_MAX_BOXES:]):
        end = _closing(text, match.end())
        if end is not None:
            boxes.insert(0, (match.start(), end, text[match.end() : end - 1].strip()))
    return [box for index, box in enumerate(boxes) if box is boxes[-1] or box[1] <= boxes[index + 1][0]]


def _closing(text: str, position: int) -> int | None:
    """Position after the brace that closes the one opened before `position`, or None."""
    depth = 1
    while position < len(text):
        character = text[position]
        if character == "\\":  # skip an escaped brace
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        position += 1
        if depth == 0:
            return position
    return None
