"""The static files of a page: HTML shell, scripts and style sheets, with their types.

The content of a page is sent by its events. The report's script and style sheet are reused, so charts, colours and
legends are the same.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from controller.report import page as report
from controller.report.timeline import Timeline

OWN = Path(__file__).parent / "static"
STATIC = {
    "dashboard.css": "text/css",
    "report.css": "text/css",
    "palette.css": "text/css",
    "dashboard.js": "text/javascript",
    "list.js": "text/javascript",
    "run.js": "text/javascript",
    "samples.js": "text/javascript",
    "actions.js": "text/javascript",
    "differences.js": "text/javascript",
    "review.js": "text/javascript",
    "report.js": "text/javascript",
    "plotly.js": "text/javascript",
}
"""Files by name, and their types."""


@cache
def asset(name: str) -> tuple[bytes, str]:
    """Read a file; return it with its ETag."""
    if name == "plotly.js":
        text = report.plotly_js()
    elif name == "palette.css":
        text = report.palette_css()
    elif name.startswith("report."):
        text = (report.TEMPLATES / f"page{Path(name).suffix}").read_text()
    else:
        text = (OWN / name).read_text()
    body = text.encode()
    return body, hashlib.sha256(body).hexdigest()[:20]


@cache
def style_ids() -> list[str]:
    """Elements that plotly's script checks for before it adds a style sheet, which the content security policy would
    block.
    """
    found = re.findall(r'getElementById\("([0-9a-f]{64})"\)', report.plotly_js())
    return ["plotly.js-style-global", *dict.fromkeys(found)]


def shell(view: str, name: str = "") -> str:
    """Render a page without content. `view` selects the content that its script adds; `name` is the name of a run."""
    data = {**report.payload([], Timeline()), "view": view, "name": name}
    ids = style_ids() if view == "run" else []
    return _template(
        "shell.html.j2",
        data=report.script_json(data),
        view=view,
        style_ids=ids,
        title=name or {"list": "", "differences": "Settings"}[view],
    )


def refusal_page(words: str) -> str:
    """Render one sentence as a page."""
    return _template("refusal.html.j2", words=words)


def _template(template: str, **context: object) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(OWN), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**context)
