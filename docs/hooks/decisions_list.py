"""Build hook: replaces `<!-- decisions -->` by the list of the decision files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLACE = "<!-- decisions -->"


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """One line per decision, by number."""
    if PLACE not in markdown:
        return markdown
    files = sorted((Path(config.docs_dir) / "decisions").glob("[0-9]*.md"))
    lines = [f"- [{_title(file)}]({file.name})" for file in files]
    return markdown.replace(PLACE, "\n".join(lines))


def _title(file: Path) -> str:
    return file.read_text().splitlines()[0].lstrip("# ").strip()
