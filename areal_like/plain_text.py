"""Text of models, programs and other processes, made harmless where people read it.

Owns: `printable`, `one_line`, the formatter of logs. Refuses: layout.

Such text may hold terminal escapes, and line breaks that would let it forge lines of a log or the reason of a death.
"""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, separators of lines, marks that turn the direction of writing, and halves of
characters."""


def printable(text: str) -> str:
    """Control characters are written as escapes; tabs and line breaks stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """The same, with line breaks written as escapes too."""
    return printable(text).replace("\n", "\\n")


class LineFormatter(logging.Formatter):
    """One line per record, whatever its message holds; only a traceback follows, on indented lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  {line}" for line in printable(text).splitlines())
