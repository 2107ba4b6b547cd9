"""Makes text of models, programs and other processes safe to display.

Such text may contain terminal escapes, and line breaks that could forge lines of a log or an exit reason.
"""

from __future__ import annotations

import logging
import re

from areal_like.secret_values import sealed_for_log, without_secrets

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, line separators, marks that change the direction of writing, and lone
surrogates."""


def printable(text: str) -> str:
    """Replace control characters by escapes; tabs and line breaks are kept."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Replace control characters and line breaks by escapes."""
    return printable(text).replace("\n", "\\n")


class LineFormatter(logging.Formatter):
    """Formats a record as one line, whatever its message contains, followed by indented lines for a traceback, without
    secrets of the environment. In processes of an encrypted run message and traceback are encrypted."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = sealed_for_log(one_line(without_secrets(record.message)))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = without_secrets(super().formatException(ei))  # type: ignore[arg-type]
        lines = "\n".join(f"  {line}" for line in printable(text).splitlines())
        return lines if (sealed := sealed_for_log(lines)) == lines else f"  {sealed}"
