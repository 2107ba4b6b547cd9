"""Build hook: `llms.txt`, an index of the site for language models (https://llmstxt.org), made from the navigation.

Each line has a page's title and the first sentence of its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_CHARS = 200
_found: list[str] = []


def on_nav(nav: Any, *, config: Any, files: Any, **_: Any) -> Any:
    """Record the pages in the order of the navigation."""
    _found[:] = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for item in nav.items:
        if item.is_section:
            _found.extend(["", f"## {item.title}", ""])
            _found.extend(_lines(item.children))
    return nav


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the file."""
    Path(config.site_dir, "llms.txt").write_text("\n".join(_found) + "\n")


def _lines(items: Any) -> Iterator[str]:
    for item in items:
        if item.is_section:
            yield from _lines(item.children)
        else:
            text = item.file.content_string
            about = first_sentence(text)
            yield f"- [{item.title}]({item.url or './'})" + (f": {about}" if about else "")


def first_sentence(markdown: str) -> str:
    """First sentence of the first paragraph of plain text; empty if there is none."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph[:1].isalnum() or paragraph[:1] in "`*[":
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":")[:MAX_CHARS]
    return ""
