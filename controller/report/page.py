"""Renders report.html: one self-contained file that needs no network.

Uses the templates of this package and embeds plotly.js. The charts are in run_charts.py and timeline.py, texts and
numbers in overview.py and diagnosis.py, answers in answers.py.

Nothing of a run becomes markup or code: text is escaped by jinja2, and chart data is embedded as JSON without `<`, so
that it cannot contain `</script>`. A content security policy in the page forbids every request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from areal_like.encryption.files import read_bytes
from areal_like.encryption.run_key import encrypted_root
from areal_like.errors import UserError
from controller.report import colours, offline_charts, overview
from controller.report.answers import AnswerPair, held_out_answers
from controller.report.charts import Axis, Chart, Section, Series, number, tidy, time_unit
from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.drawn import comparison
from controller.report.files import make_folder, replace_file
from controller.report.finding import Finding
from controller.report.picture import run_sheet, save
from controller.report.run_charts import sections
from controller.report.slices import clusters
from controller.report.slices import table as slice_table
from controller.report.timeline import Timeline, read_timeline
from controller.run_folder.formatting import span
from controller.run_folder.run_folder import RunFolder, is_from_files
from controller.run_folder.run_notes import read_notes

TEMPLATES = Path(__file__).parent / "templates"
PLOTLY = Path(__file__).parent / "vendored" / "plotly-basic.min.js"
"""plotly.js with the trace types `scatter`, `bar` and `pie` (decision 0153)."""
PAGE, PICTURE = "report.html", "report.png"
MAX_CONFIG_CHARS = 200_000
MARKS = {"bad": "✖", "warning": "▲", "good": "✔", "info": "●"}
_CONTENTS = (("diagnosis", "Diagnosis"), ("numbers", "Key numbers"))
_DRAWN = ("drawn", "Drawn and trained")
_SAMPLES = ("samples", "Samples")
_SLICES = ("slices", "Slices")
_APPENDIX = (("events", "Events"), ("config", "Configuration"), ("environment", "Environment"))


def write_report(folder: RunFolder) -> Path:
    """Draw the report and return only the page's path."""
    return draw_report(folder)[0]


def draw_report(
    folder: RunFolder, answer_pairs: Sequence[AnswerPair] = (), out: Path | None = None
) -> tuple[Path, list[Finding]]:
    """Write report.html and report.png into `out`, else the run folder; return the page's path and its findings.

    May be called from any thread, during the run or after it. `answer_pairs`: training answers to show. Raises
    UserError if the folder contains nothing that can be read, if it cannot be written to, or if matplotlib is not
    installed.
    """
    data = RunData.load(folder)
    is_offline = is_from_files(data.state)
    found = offline_charts.sections(data) if is_offline else sections(data)
    timeline, findings = read_timeline(data), diagnose(data)
    if encrypted_root(out or folder.root) is not None:
        what = "the report contains texts of the run in the clear, and the run is encrypted"
        remedy = "choose a folder outside of it with --out FOLDER"
        raise UserError(what, where=str(out or folder.root), remedy=remedy)
    target = out or folder.root
    if out is not None:
        make_folder(out)
    path = target / PAGE
    write_page(path, run_page(data, findings, found, timeline, answer_pairs))
    if is_offline:
        picture = run_sheet(data, findings, found, None, offline_charts.order(found))
    else:
        picture = run_sheet(data, findings, found, timeline)
    save(picture, target / PICTURE)
    return path, findings


def run_page(
    data: RunData, findings: Sequence[Finding], found: Sequence[Section], timeline: Timeline,
    answer_pairs: Sequence[AnswerPair] = (),
) -> str:  # fmt: skip
    """Render the page of one run as text."""
    kind, words = _state(data)
    events, events_left_out = overview.events(data)
    contents = list(_CONTENTS)
    has_rollouts = not is_from_files(data.state)
    has_draws = has_rollouts and data.state.get("command") != "eval"
    for section in found:
        contents.append((section.key, section.title))
        if section.key == "learning" and has_rollouts:
            contents.append(_SAMPLES)
            contents += [_SLICES] if data.slices else []
        if section.key == "speed":
            contents.append(("timeline", "Timeline"))
    return render(
        "report.html.j2",
        charts=[chart for section in found for chart in section.charts],
        timeline=timeline,
        contents=[*contents, *([_DRAWN] if has_draws else []), *_APPENDIX],
        name=overview.text(data.folder.name, 120),
        kind=kind,
        words=overview.text(words),
        note=overview.text(read_notes(data.folder.root).line),
        findings=[_harmless(finding) for finding in findings],
        marks=MARKS,
        figures=overview.figures(data),
        drawn=comparison(data) if has_draws else None,
        sections=found,
        classes=chart_classes(found),
        has_rollouts=has_rollouts,
        has_draws=has_draws,
        held_out=held_out_answers(data.evals),
        slices=slice_table(data.slices),
        clusters=clusters(data.slices[-1]) if data.slices else [],
        slices_version=data.slices[-1]["version"] if data.slices else None,
        answer_pairs=answer_pairs,
        waits=overview.waits(data),
        has_pulses=bool(data.pulses),
        events=events,
        events_left_out=events_left_out,
        config_text=_config_text(data.folder),
        environment=overview.environment(data),
        bin_words=f"{timeline.bin_s:.3g} s" if timeline.bin_s >= 1 else f"{timeline.bin_s * 1000:.0f} ms",
    )


def render(template: str, *, charts: Sequence[Chart], timeline: Timeline | None = None, **context: Any) -> str:
    """Render a page from a template with the charts it refers to."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(
        **context,
        timeline=timeline or Timeline(),
        css=(TEMPLATES / "page.css").read_text(),
        palette_css=palette_css(),
        js=(TEMPLATES / "page.js").read_text(),
        plotly_js=plotly_js(),
        payload=script_json(payload(charts, timeline or Timeline())),
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        span=span,
        percent=lambda share: f"{share:.1%}",
        shares=overview.process_shares,
    )


def payload(charts: Sequence[Chart], timeline: Timeline) -> dict[str, Any]:
    """Data for the page's script."""
    unit, per_unit = time_unit(timeline.length_s)
    return {
        "palettes": {"light": palette(colours.LIGHT), "dark": palette(colours.DARK)},
        "charts": {
            chart.key: {
                "key": chart.key, "x": _axis(chart.x), "y": _axis(chart.y),
                "series": [_series(series) for series in chart.drawn],
            }
            for chart in charts if not chart.is_empty
        },
        "timeline": {
            "x": _axis(Axis("time since the start", unit)),
            "length": tidy(timeline.length_s / per_unit),
            "breaks": [tidy(rest.at_s / per_unit) for rest in timeline.breaks],
            "activities": [
                {"name": name, "colour": colours.activity_colour(name), "is_wait": colours.is_wait(name)}
                for name in timeline.activities
            ],
            "strips": [
                {
                    "label": markup_free(strip.name), "xs": [tidy(x / per_unit) for x in strip.xs_s],
                    "shares": {name: values for name, values in strip.shares.items() if any(values)},
                }
                for strip in timeline.strips
            ],
        },
    }  # fmt: skip


def markup_free(label: str) -> str:
    """Escape the tags that plotly interprets in labels."""
    return overview.text(label, 60).replace("<", "‹").replace(">", "›")


def _series(series: Series) -> dict[str, Any]:
    xs = [markup_free(x) if isinstance(x, str) else x for x in series.xs]
    return {**msgspec.to_builtins(series), "name": markup_free(series.name), "xs": xs}


def _axis(axis: Axis) -> dict[str, Any]:
    return dict(msgspec.to_builtins(axis))


def palette(colour: Mapping[str, str]) -> dict[str, str]:
    """A palette with the additional names of the page."""
    return {**colour, "line": colour["grid"]}


def palette_css() -> str:
    """The palettes as CSS custom properties; dark if the reader's system or the button selects it."""
    light, dark = (_properties(one, back) for one, back in ((colours.LIGHT, "#f4f5f7"), (colours.DARK, "#0c0e12")))
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}\n'
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ color-scheme: dark; {dark} }} }}'
    )


def _properties(colour: Mapping[str, str], back: str) -> str:
    more = {"back": back, "line": colour["muted"] + "66"}
    return " ".join(f"--{name}: {value};" for name, value in {**colour, **more}.items())


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<`, no line separators of JavaScript."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def plotly_js() -> str:
    """The script that draws the charts."""
    return PLOTLY.read_text(encoding="utf-8")


def write_page(path: Path, page: str) -> None:
    """Replace a page atomically. Raises UserError."""
    replace_file(path, lambda fresh: fresh.write_text(page, encoding="utf-8", errors="replace"))


def _state(data: RunData) -> tuple[str, str]:
    """State of the run, and a sentence about it that stays true later."""
    found = data.where
    if found is None:
        return "unknown", "the outcome of this run cannot be read"
    ended_s = number(found.state.get("ended_s", found.state.get("updated_s")))
    if found.kind in ("running", "crashed", "foreign") or ended_s is None:
        return found.kind, f"{found.words} (when this page was made)"
    reason = str(found.state.get("reason") or "")
    return found.kind, f"{found.kind} at {overview.dated(ended_s)}" + (f": {reason}" if reason else "")


def _harmless(finding: Finding) -> Finding:
    words = ("title", "detail", "advice", "predicted")
    changes: dict[str, Any] = {part: overview.text(getattr(finding, part), 2000) for part in words}
    return replace(finding, **changes)


def chart_classes(found: Sequence[Section]) -> dict[str, str]:
    """CSS classes: the learning curve is tall; it, and the last of an odd number of charts, spans both columns."""
    classes = {"chart-learning": "wide tall"}
    for section in found:
        keys = [chart.key for chart in section.charts if not chart.is_empty and chart.key not in classes]
        if len(keys) % 2:
            classes[keys[-1]] = "wide"
    return classes


def _config_text(folder: RunFolder) -> str:
    try:
        return overview.text(read_bytes(folder.config).decode(errors="replace"), MAX_CONFIG_CHARS)
    except (OSError, UserError):
        return ""
