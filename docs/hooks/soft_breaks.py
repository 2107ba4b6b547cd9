"""Build hook: lets long names in tables break after a dot or an underscore, so that narrow tables stay legible.

Inserts `<wbr>` into the code of table cells, not into other text or blocks of code.
"""

from __future__ import annotations

import re
from typing import Any

_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
LONG = 20
"""Characters; shorter names are not broken."""
_CODE = re.compile(r"<code>([^<]*)</code>")
_SEAM = re.compile(r"(?<=\w)([._/=:])(?=\w)")


def on_page_content(content: str, **_: Any) -> str:
    """Change every table of a page."""
    return _CELL.sub(lambda cell: _CODE.sub(_softened, cell[0]), content)


def _softened(code: re.Match[str]) -> str:
    return code[0] if len(code[1]) < LONG else "<code>" + _SEAM.sub(r"\1<wbr>", code[1]) + "</code>"
