"""Plots for the documentation: SVG files whose colours follow the reader's theme, marked with their result file.

Contains the style of plots and the mark. Panels are drawn in plots.py and in some benchmarks.

Text and lines that follow the theme are drawn in INK and FAINT; in the file these become CSS variables with a value for
light and one for dark. The site sets the same variables for its own theme switch (docs/assets/site.css).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, FAINT = "#010203", "#040506"
"""Placeholders for the colours of text and of grid lines; no series may use them."""
SERIES = ("#2f7de1", "#d9731a", "#2c9c6a", "#a259c4")
"""Colours that are legible on white and on dark grey, also for colour-blind readers (each also has a marker)."""
WIDTH_IN, PANEL_IN = 4.8, 2.4
"""Width of a picture and height of a panel in inches: legible on a phone."""
MARKERS = ("o", "s", "^", "D")

_STYLE = (
    "<style>.plot{--plot-ink:#1f2328;--plot-faint:#d3d8de}"
    "@media(prefers-color-scheme:dark){.plot{--plot-ink:#e6e8ec;--plot-faint:#4a4f59}}</style>"
)


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a panel's series; four times as many series as colours can be distinguished."""
    again = number // len(SERIES)
    dashes = ("-", "--", ":", "-.")[again % 4]
    marker = MARKERS[(number + again) % len(MARKERS)]
    return {"color": SERIES[number % len(SERIES)], "marker": marker, "linestyle": dashes}


def figure(num_panels: int, *, heights_in: Sequence[float] | None = None) -> tuple[Any, list[Any]]:
    """An empty figure with panels one below the other, PANEL_IN high or as given."""
    heights = list(heights_in) if heights_in is not None else [PANEL_IN] * num_panels
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "areal_like", "font.family": "sans-serif", "font.size": 9.5,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titleweight": "bold", "grid.color": FAINT,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    })  # fmt: skip
    from matplotlib import pyplot

    made, axes = pyplot.subplots(
        num_panels, 1, figsize=(WIDTH_IN, sum(heights)), height_ratios=heights, layout="constrained"
    )
    panels = [axes] if num_panels == 1 else list(axes)
    for panel in panels:
        panel.grid(axis="y", linewidth=0.6)
        panel.set_axisbelow(True)
    return made, panels


def save(made: Any, path: Path, *, title: str, description: str, source: Path) -> Path:
    """Write the figure as an SVG marked with the digest of the result file it shows. title, description: for readers
    who cannot see it."""
    buffer = io.StringIO()
    from matplotlib import pyplot

    made.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(made)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = text.replace('<style type="text/css">*{', "<style>.plot *{")  # else it would apply to the whole page
    text = text.replace(INK, "var(--plot-ink)").replace(FAINT, "var(--plot-faint)")
    head, _, body = text.partition(">")
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    head += f' class="plot" role="img" data-made-from="{source.name} {digest(source)}"'
    label = f"<title>{_escaped(title)}</title><desc>{_escaped(description)}</desc>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.rstrip() for line in f"{head}>{label}{_STYLE}{body}".splitlines()) + "\n")
    return path


def digest(source: Path) -> str:
    """Digest of a result file's bytes. The site's build warns of a picture with another mark."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def _escaped(text: str) -> str:
    """Escape a text and put it on one line."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
