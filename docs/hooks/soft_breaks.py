"""Build hook: long names in tables may break after a dot or an underscore, so that narrow tables stay legible.

Owns: `<wbr>` in code of table cells. Refuses: running text (a name goes on the next line whole), blocks of code.
"""

from __future__ import annotations

import re
from typing import Any

_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
LONG = 20
"""Characters; shorter names stay whole."""
_CODE = re.compile(r"<code>([^<]*)</code>")
_SEAM = re.compile(r"(?<=\w)([._/=:])(?=\w)")


def on_page_content(content: str, **_: Any) -> str:
    """Every table of a page."""
    return _CELL.sub(lambda cell: _CODE.sub(_softened, cell[0]), content)


def _softened(code: re.Match[str]) -> str:
    return code[0] if len(code[1]) < LONG else "<code>" + _SEAM.sub(r"\1<wbr>", code[1]) + "</code>"
