"""The answer of `areal-like lineage` as an SVG: one column for each kind of node, edges from left to right.

A column has at most MAX_NODES boxes; what is left out is counted in one box. Colours follow the viewer's light or dark
scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from areal_like.plain_text import one_line
from controller.report.colours import DARK, LIGHT
from controller.runs.lineage.answer import Answer
from controller.runs.lineage.graph import KINDS, Node, name_of

MAX_NODES = 14
MAX_CHARS = 26
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 190, 26, 60, 8, 20
"""Size of a box and distances, in pixels."""
HEAD = 64
"""Height of title and column titles, in pixels."""
_COLOURS = {
    "source": "c6", "original": "c6", "file": "c4", "row": "c2", "sample": "c0", "batch": "c5", "version": "c1",
    "checkpoint": "c3", "export": "c7",
}  # fmt: skip
_TITLES = {
    "source": "original file", "original": "original row", "file": "file", "row": "row", "sample": "sample",
    "batch": "batch", "version": "version", "checkpoint": "checkpoint", "export": "exported model",
}  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A node, or those that are left out (`node` None). x, y: upper left corner."""

    kind: str
    text: str
    full: str
    x: int
    y: int
    node: Node | None = None


def picture(found: Answer) -> str:
    """The SVG document."""
    nodes = {*found.subjects, *found.came_from, *found.went_into}
    columns = [kind for kind in KINDS if any(one.kind == kind for one in nodes)]
    boxes: list[Box] = []
    box_of: dict[Node, Box] = {}
    for number, kind in enumerate(columns):
        x = MARGIN + number * (WIDTH + GAP_X)
        _fill(found, kind, found.of_kind(kind, nodes), x, boxes, box_of)
    tallest = max(box.y for box in boxes) + HEIGHT
    width = 2 * MARGIN + len(columns) * WIDTH + (len(columns) - 1) * GAP_X
    subject = ", ".join(f"{_TITLES[one.kind]} {name_of(found.graph, one)}" for one in found.subjects[:3])
    subject = subject.replace("version version", "version").replace("batch step", "step")
    title = f"Lineage of {subject}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tallest + MARGIN}" width="{width}" '
        f'height="{tallest + MARGIN}" style="max-width:100%;height:auto" role="img" aria-label="{_text(title)}">',
        f"<title>{_text(title)}</title>", _style(),
        f'<rect class="paper" width="{width}" height="{tallest + MARGIN}"/>',
        f'<text class="title" x="{MARGIN}" y="26">{_text(_cut(title, width // 9))}</text>',
    ]  # fmt: skip
    for number, kind in enumerate(columns):
        count = sum(one.kind == kind for one in nodes)
        x = MARGIN + number * (WIDTH + GAP_X)
        parts.append(f'<text class="head" x="{x}" y="52">{_TITLES[kind]} ({count:,})</text>')
    pairs = {(box_of[first], box_of[last]) for first, last in found.edges}
    parts += [_edge(first, last) for first, last in sorted(pairs, key=_ends) if first is not last]
    parts += [_box(box, box.node in found.subjects) for box in boxes]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _fill(
    found: Answer, kind: str, nodes: list[Node], x: int, boxes: list[Box], box_of: dict[Node, Box]
) -> None:  # fmt: skip
    """Make the boxes of a column. The first and last nodes are shown, and always the subject."""
    shown = set(nodes)
    if len(nodes) > MAX_NODES:
        own = [one for one in nodes if one in found.subjects][: MAX_NODES // 2]
        left = MAX_NODES - 1 - len(own)
        others = [one for one in nodes if one not in own]
        shown = {*own, *others[: left - left // 2], *others[len(others) - left // 2 :]}
    hidden = [one for one in nodes if one not in shown]
    y = HEAD
    rest: Box | None = None
    for node in nodes:
        if node in shown:
            full = name_of(found.graph, node)
            box_of[node] = Box(kind, _cut(full, MAX_CHARS), full, x, y, node)
            boxes.append(box_of[node])
        else:
            if rest is None:
                rest = Box(kind, f"… {len(hidden):,} more", f"{len(hidden):,} more", x, y)
                boxes.append(rest)
            else:
                y -= HEIGHT + GAP_Y
            box_of[node] = rest
        y += HEIGHT + GAP_Y


def _edge(first: Box, last: Box) -> str:
    if first.x == last.x:  # from a version to the next one
        x, y = first.x + WIDTH // 2, first.y + HEIGHT
        return f'<path class="edge" d="M{x} {y} L{x} {last.y}"/>' if last.y == y + GAP_Y else ""
    x, y, end_x, end_y = first.x + WIDTH, first.y + HEIGHT // 2, last.x, last.y + HEIGHT // 2
    if end_x < x:
        x, end_x = first.x, last.x + WIDTH
    bend = (end_x - x) // 2
    return f'<path class="edge" d="M{x} {y} C{x + bend} {y} {end_x - bend} {end_y} {end_x} {end_y}"/>'


def _ends(pair: tuple[Box, Box]) -> tuple[int, int, int, int]:
    return pair[0].x, pair[0].y, pair[1].x, pair[1].y


def _box(box: Box, is_subject: bool) -> str:
    kind = "subject" if is_subject else "plain" if box.node is not None else "more"
    return (
        f'<g class="{kind} {_COLOURS[box.kind]}"><title>{_text(box.full)}</title>'
        f'<rect x="{box.x}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{box.x + 8}" y="{box.y + HEIGHT // 2 + 4}">{_text(box.text)}</text></g>'
    )


def _style() -> str:
    def rules(scheme: Mapping[str, str]) -> str:
        own = "".join(f".{name} rect{{stroke:{scheme[name]}}}" for name in sorted(set(_COLOURS.values())))
        return (
            f".paper{{fill:{scheme['paper']}}} text{{fill:{scheme['ink']}}} .head,.more text{{fill:{scheme['muted']}}} "
            f"g rect{{fill:{scheme['paper']}}} .edge{{stroke:{scheme['muted']}}} {own}"
        )

    return (
        "<style>text{font:12px system-ui,sans-serif} .title{font-size:16px;font-weight:600} .head{font-weight:600} "
        "g rect{stroke-width:1.5} .subject rect{stroke-width:4} .subject text{font-weight:700} "
        ".more rect{stroke-dasharray:4 3} .edge{fill:none;stroke-opacity:.5} "
        f"{rules(LIGHT)} @media (prefers-color-scheme:dark){{{rules(DARK)}}}</style>"
    )


def _cut(text: str, most: int) -> str:
    """A text of at most `most` characters; the middle of a longer one is left out."""
    text = one_line(text)
    return text if len(text) <= most else f"{text[: most // 3]}…{text[len(text) - (most - most // 3 - 1) :]}"


def _text(text: str) -> str:
    return escape(one_line(text))
