"""One page for a result file: its table and its plot, as in the documentation.

    python -m benchmarks.page                         every file of benchmarks/results, pictures drawn again
    python -m benchmarks.page RESULT.json ...         these

The page is one HTML file next to the result and loads nothing. Tables are in benchmarks/tables, plots in panels.py and
in the benchmarks that draw their own.
"""

from __future__ import annotations

import html
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from benchmarks import plots
from benchmarks.folders import REPOSITORY, RESULTS
from benchmarks.panels import panels_of
from benchmarks.tables import markdown

OWN = ("async_vs_sync", "simulator", "staleness")
"""Benchmarks that draw their own plot with `plot(source, picture)` in their module."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root{{color-scheme:light dark;--ink:#1f2328;--paper:#fff;--rule:#d3d8de}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e6e8ec;--paper:#16181d;--rule:#4a4f59}}}}
body{{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;
padding:0 1rem}}
.table{{overflow-x:auto}} table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:.25rem .6rem;border-bottom:1px solid var(--rule);text-align:left;white-space:nowrap}}
svg{{width:100%;max-width:34rem;height:auto;display:block}}
</style></head><body><h1>{title}</h1>
{plot}
{body}
</body></html>
"""


def main() -> None:
    """Write pages for the named files, or for all."""
    for source in [Path(word) for word in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        if not source.is_file():
            raise SystemExit(f"{source} does not exist; a benchmark writes it: python -m benchmarks.QUESTION")
        try:
            print(publish(source.stem, source))
        except (KeyError, TypeError, ValueError) as error:
            raise SystemExit(
                f"{source} is not a result that `python -m benchmarks.{source.stem}` writes: {error!r}"
            ) from error


def publish(name: str, source: Path) -> Path:
    """Draw the result's picture and write its page; returns the page."""
    result = json.loads(source.read_text())
    drawn = _draw(name, result, source, picture_of(name, source))
    text = MarkdownIt("commonmark").enable("table").render(markdown(name, result))
    text = text.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    page = source.with_suffix(".html")
    plot = drawn.read_text() if drawn is not None else ""
    page.write_text(_PAGE.format(title=html.escape(name.replace("_", " ")), plot=plot, body=text))
    return page


def _draw(name: str, result: dict[str, Any], source: Path, picture: Path) -> Path | None:
    """Draw the picture; None, and an older picture is removed, if there is nothing to draw."""
    if name in OWN:
        drawn: Path | None = importlib.import_module(f"benchmarks.{name}").plot(source, picture)
    else:
        panels = panels_of(name, result)
        drawn = plots.draw(name, panels, source, picture) if panels else None
    if drawn is None:
        picture.unlink(missing_ok=True)
    return drawn


def picture_of(name: str, source: Path) -> Path:
    """The picture's path: in the documentation for a published result, otherwise next to the result file."""
    is_published = source.resolve().parent == RESULTS
    return REPOSITORY / "docs" / "pictures" / f"{name}.svg" if is_published else source.with_suffix(".svg")


if __name__ == "__main__":
    main()
