r"""The content of `\boxed{...}`, where mathematics puts its final answer: in solutions of data sets and in responses.

Owns: `last_boxed`. Refuses: other marks of an answer, and what its content means (their readers').
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_BOXES = 20
"""Unclosed boxes looked past, from the end: a response may be nothing but boxes."""
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*([^\s{}$\\]+)")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` (or `\fbox`), braces balanced; else of the last bare `\boxed 5`.

    None where there is neither; "" for an empty box.
    """
    for match in reversed(list(_BOX.finditer(text))[-_MAX_BOXES:]):
        depth = 1
        position = match.end()
        while position < len(text):
            character = text[position]
            if character == "\\":  # an escaped brace is no brace
                position += 2
                continue
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return text[match.end() : position].strip()
            position += 1
    bare: list[str] = _BARE_BOX.findall(text)
    return bare[-1] if bare else None
