"""Build hook: replaces `<!-- measured: NAME -->` by the table of benchmarks/results/NAME.json, command and machine.

Without a result file the page says so and how to make one. The tables are made in benchmarks/tables.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs may be started in any folder

from benchmarks.tables import markdown as as_markdown

_PLACE = re.compile(r"^<!-- measured: (?P<name>\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace every placeholder of a page."""
    root = Path(config.docs_dir).parent

    def filled(match: re.Match[str]) -> str:
        return section(root, match["name"], to_root="../" * page.file.src_uri.count("/"))

    return _PLACE.sub(filled, markdown)


def section(root: Path, name: str, *, to_root: str = "") -> str:
    """The Markdown for one benchmark."""
    source = root / "benchmarks" / "results" / f"{name}.json"
    if not source.is_file():
        return (
            f'!!! note "Not measured yet"\n    `benchmarks/results/{name}.json` does not exist. '
            f"`python -m benchmarks.{name}` writes it; this page then shows it."
        )
    result = json.loads(source.read_text())
    picture = root / "docs" / "pictures" / f"{name}.svg"
    drawn = f"![{name}: the measured values, as in the table below]({to_root}pictures/{name}.svg)\n\n"
    return (drawn if picture.is_file() else "") + as_markdown(name, result)
