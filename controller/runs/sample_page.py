"""Renders samples as one self-contained page: sortable, searchable, light and dark, readable on a phone.

Samples are selected in sample_rows.py. Text of models and data is untrusted: the template escapes it, and a content
security policy allows only the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.report.colours import DARK, LIGHT
from controller.run_folder.formatting import number, printable
from controller.run_folder.owner_host import whereabouts
from controller.run_folder.run_folder import RunFolder
from controller.runs.sample_rows import Choice, Found, Sample
from controller.runs.sample_text import headline, trajectory_title

TEMPLATES = Path(__file__).with_name("templates")
MAX_CHARS = 20_000
"""The middle of a longer text is left out: a page of two hundred 32k-token answers would be too large for a phone."""
COLUMNS = (
    ("sample", "sample", "group and index", "word"),
    ("reward", "reward", "the score of the sample", "num"),
    ("parts", "parts", "components of the reward", "word"),
    ("step", "step", "the step that used the sample", "num"),
    ("staleness", "stale", "versions between sampling and use", "num"),
    ("versions", "versions", "policy versions that sampled the answer", "num"),
    ("tokens", "tokens", "length of the answer", "num"),
    ("end", "end", "stop: the answer ended normally; length: it was truncated", "word"),
    ("worker", "worker", "the process that generated the sample", "word"),
)
_SOFT = {"light": "#f4f6f8", "dark": "#1d2229"}


def sample_page(folder: RunFolder, choice: Choice, found: Found, *, is_full: bool = False) -> str:
    """Render the page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    script = (TEMPLATES / "samples.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("samples.html.j2").render(
        run=printable(folder.name),
        headline=printable(headline(folder, choice, found).removeprefix(f"{folder.name}: ")),
        written=time.strftime("%Y-%m-%d %H:%M"),
        run_words=_run_words(folder),
        problems=[printable(problem) for problem in found.problems],
        columns=COLUMNS,
        rows=_rows(found.samples, is_full),
        palette_css=_palette(),
        css=(TEMPLATES / "samples.css").read_text(),
        js=script,
        script_hash=f"sha256-{digest}",
    )


def _run_words(folder: RunFolder) -> str:
    try:
        kind = whereabouts(folder).kind
    except UserError:
        return ""
    return {
        "running": "is in progress", "finished": "is finished", "stopped": "was stopped", "failed": "has failed",
        "crashed": "has crashed", "foreign": "belongs to another machine",
    }[kind]  # fmt: skip


def _palette() -> str:
    def variables(colours: Mapping[str, str], soft: str) -> str:
        names = ("paper", "ink", "muted", "grid", "c0", "c4", "c5")
        return " ".join(f"--{name}: {colours[name]};" for name in names) + f" --soft: {soft};"

    light, dark = variables(LIGHT, _SOFT["light"]), variables(DARK, _SOFT["dark"])
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
        f":root[data-theme=light] {{ color-scheme: light; {light} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}"
    )


def _rows(samples: Sequence[Sample], is_full: bool) -> list[dict[str, Any]]:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return [_row(order, sample, low, high, is_full) for order, sample in enumerate(samples)]


def _row(order: int, sample: Sample, low: float, high: float, is_full: bool) -> dict[str, Any]:
    share = None if sample.reward is None or high <= low else (sample.reward - low) / (high - low)
    is_long = not is_full and len(sample.answer) > MAX_CHARS
    return {
        "cells": {
            "sample": sample.name,
            "reward": number(sample.reward),
            "step": "-" if sample.step is None else sample.step,
            "staleness": "-" if sample.staleness is None else sample.staleness,
            "versions": sample.versions,
            "tokens": f"{sample.num_tokens:,}",
            "end": sample.finish_reason or "-",
            "worker": printable(sample.worker),
        },
        "sort": {
            "order": order,
            "sample": sample.group_id * 1000 + sample.sample_index,
            "reward": _known(sample.reward),
            "parts": _known(next(iter(sample.components.values()), None)),
            "step": _known(sample.step),
            "staleness": _known(sample.staleness),
            "versions": sample.first_version,
            "tokens": sample.num_tokens,
            "end": sample.finish_reason,
            "worker": sample.worker,
        },
        "bar": None if share is None else round(100 * share),
        "parts": [(printable(name), f"{value:g}") for name, value in sample.components.items()],
        "remarks": [printable(remark) for remark in sample.remarks()],
        "prompt": _cut(sample.prompt, is_full),
        "answer": _cut(sample.answer, is_full),
        "trajectories": [
            {
                "title": trajectory_title(place, len(sample.trajectories), one) if len(sample.trajectories) > 1 else "",
                "spans": [(span.versions, span.source, _cut(span.text, is_full)) for span in one.spans],
            }
            for place, one in enumerate(sample.trajectories, 1)
        ],
        "pieces": [] if is_long else [(version, printable(text)) for version, text in sample.pieces],
    }


def _known(value: float | int | None) -> str:
    """A value to sort by; empty if there is none."""
    return "" if value is None else repr(value)


def _cut(text: str, is_full: bool) -> str:
    if is_full or len(text) <= MAX_CHARS:
        return printable(text)
    half = MAX_CHARS // 2
    left_out = len(text) - 2 * half
    return printable(f"{text[:half]}\n[... {left_out:,} more characters; use --full]\n{text[-half:]}")
