"""Build hook: replaces a picture `![...](pictures/NAME.svg)` by the SVG itself, so that it follows the theme's colours.

Warns of a plot that was drawn from another result file than the current one. In the Markdown it remains an ordinary
image, which other viewers show.
"""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger

log = get_plugin_logger(__name__)
_IMAGE = re.compile(r'<img\s[^>]*src="(?:\.\./)*pictures/(?P<name>[\w.-]+)\.svg"[^>]*>')
_MARK = re.compile(r'data-made-from="(?P<file>\S+) (?P<digest>[0-9a-f]+)"')


def on_page_content(content: str, *, page: Any, config: Any, **_: Any) -> str:
    """Insert every local SVG into the page. mkdocs itself warns of a missing picture."""
    pictures = Path(config.docs_dir) / "pictures"
    results = Path(config.docs_dir).parent / "benchmarks" / "results"

    def inlined(match: re.Match[str]) -> str:
        svg = (pictures / f"{match['name']}.svg").read_text()
        _refuse_old(match["name"], svg, results)
        alt = re.search(r'alt="([^"]*)"', match[0])
        label = html.escape(html.unescape(alt[1])) if alt else match["name"]
        body = "\n".join(line for line in svg[svg.index("<svg") :].splitlines() if line.strip())
        return f'<span class="picture picture-{match["name"]}" aria-label="{label}">{body}</span>'

    return _IMAGE.sub(inlined, content)


def _refuse_old(name: str, svg: str, results: Path) -> None:
    mark = _MARK.search(svg)
    if mark is None:
        return
    source = results / mark["file"]
    found = hashlib.sha256(source.read_bytes()).hexdigest()[:16] if source.is_file() else "nothing"
    if found != mark["digest"]:
        log.warning(
            f"pictures/{name}.svg was not drawn from {source} as it is now; draw it again: python -m benchmarks.page"
        )
