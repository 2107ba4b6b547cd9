"""Reports and comparisons in a real browser without a network: links, console, phone and desk, light and dark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.report.compare import compare
from controller.report.page import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "controller" / "support"))
from report_run import HOSTILE, START_S, report_run, write_traces

pytestmark = pytest.mark.e2e

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TIMEOUT_MS = 120_000
"""Generous: it only bounds a hang."""
STICKING_OUT = """() => [...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('nav, .scroll, pre'))
    .slice(0, 5).map(e => e.tagName + '.' + e.getAttribute('class'))"""
OVERLAPPING_LABELS = """() => {
    const boxes = [...document.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle')]
        .map(e => [e, e.getBoundingClientRect()]).filter(([e, box]) => box.width && box.height);
    const faults = [];
    for (const [i, [a, one]] of boxes.entries()) for (const [b, other] of boxes.slice(i + 1))
        if (a.closest('.plot') === b.closest('.plot')
            && Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1
            && Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 2)
            faults.push(`${a.closest('.plot').ariaLabel}: ${a.textContent} and ${b.textContent}`);
    return faults.slice(0, 5);
}"""

PRESS = """selector => {
    const found = document.querySelector(selector);
    found.scrollIntoView({block: 'center', behavior: 'instant'});
    const box = found.getClientRects()[0];
    const hit = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    if (!found.contains(hit)) return `${selector} is covered by ${hit && hit.outerHTML.slice(0, 80)}`;
    found.click();
    return '';
}"""
"""Playwright's own click waits for animation frames, of which a busy machine's headless browser may give none."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by what their runs are like."""
    runs = tmp_path_factory.mktemp("runs")
    whole = report_run(runs, "whole", num_steps=40)
    resumed = report_run(runs, "resumed", num_steps=10)
    write_traces(resumed, 10, 4.0, 2, start_s=START_S + 90_000)
    hostile = report_run(runs, f"a<b>&'\"{'x' * 60}", words=HOSTILE)
    empty = report_run(
        runs, "empty", num_steps=0, has_pulses=False, has_traces=False, has_ledger=False, status="failed"
    )
    with pytest.MonkeyPatch.context() as patch:  # pictures take half of the time, and no test here looks at them
        patch.setattr("controller.report.page.run_sheet", lambda *data: None)
        patch.setattr("controller.report.page.save", lambda *picture: None)
        patch.setattr("controller.report.compare._sheet", lambda *data: None)
        patch.setattr("controller.report.picture.save", lambda *picture: None)
        found = {folder.name[:7]: write_report(folder) for folder in (whole, resumed, hostile, empty)}
        compare([whole, resumed, hostile, empty], runs / "compared")
    return {"hostile" if name.startswith("a<b>") else name: path for name, path in found.items()} | {
        "compare": runs / "compared" / "compare.html"
    }


class Reader:
    """One page in a browser that is offline and remembers what went wrong."""

    def __init__(self, browser: Any, path: Path, viewport: dict[str, int], scheme: str) -> None:
        self.faults: list[str] = []
        is_phone = viewport is PHONE
        context = browser.new_context(
            viewport=viewport, color_scheme=scheme, offline=True, is_mobile=is_phone, has_touch=is_phone
        )
        self.page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", lambda message: self.faults.append(f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self._asked(request.url, path.as_uri()))
        self.page.goto(path.as_uri())
        self.drawn(scheme)

    def _asked(self, url: str, own: str) -> None:
        if not url.startswith((own, "data:", "blob:")):
            self.faults.append(f"asks for {url[:200]}")

    def drawn(self, scheme: str) -> None:
        """Wait until every chart is drawn in these colours."""
        self.page.wait_for_selector(f"body[data-drawn={scheme}]", state="attached")

    def press(self, selector: str) -> None:
        """Click what a finger would reach there."""
        assert self.page.evaluate(PRESS, selector) == ""

    @property
    def num_charts(self) -> int:
        return self.page.locator(".plot .main-svg").count()

    def close(self) -> None:
        self.page.context.close()


@pytest.fixture(scope="module")
def read(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """read(page, viewport, scheme) opens one, or goes on with the one that is open: opening is what costs."""
    opened: dict[tuple[str, int, str], Reader] = {}

    def opens(name: str, viewport: dict[str, int] = DESK, scheme: str = "light") -> Reader:
        key = (name, viewport["width"], scheme)
        if key not in opened:
            opened[key] = Reader(browser, pages[name], viewport, scheme)
        return opened[key]

    yield opens
    for reader in opened.values():
        reader.close()


NAMES = ["whole", "resumed", "hostile", "empty", "compare"]


MORE_ON_A_PHONE = ("resumed", "empty")
"""What is new in them is on a phone as in the other pages: opening one takes seconds."""
OPENED = [
    *(pytest.param(name, DESK, "light", id=f"{name}-1280-light") for name in NAMES),
    *(
        pytest.param(
            name, PHONE, "dark", id=f"{name}-390-dark", marks=[pytest.mark.thorough] if name in MORE_ON_A_PHONE else []
        )
        for name in NAMES
    ),
]


@pytest.mark.parametrize(("name", "viewport", "scheme"), OPENED)
def test_a_page_opens_offline_without_error_overflow_or_overlap(
    read: Any, name: str, viewport: dict[str, int], scheme: str
) -> None:
    reader = read(name, viewport, scheme)
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert reader.page.evaluate(STICKING_OUT) == []
    assert reader.page.evaluate(OVERLAPPING_LABELS) == []
    paper = reader.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(12, 14, 18)") == (scheme == "dark")
    assert reader.faults == []


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_its_place_below_the_header(read: Any, name: str) -> None:
    reader = read(name)
    links = reader.page.eval_on_selector_all("a[href]", "found => found.map(a => a.getAttribute('href'))")
    assert len(links) >= 5
    for link in links:
        reader.press(f'a[href="{link}"]')
        top, at_end = reader.page.evaluate(
            "link => [document.querySelector(link).getBoundingClientRect().top,"
            " innerHeight + scrollY >= document.documentElement.scrollHeight - 2]",
            link,
        )
        assert link == "#top" or 40 <= top <= 140 or at_end, (link, top)
    assert reader.faults == []


def test_all_charts_are_drawn_and_redrawn_in_the_other_theme(browser: Any, pages: dict[str, Path]) -> None:
    reader = Reader(browser, pages["whole"], DESK, "light")  # of its own: the page keeps the theme
    num_charts = reader.page.locator("[data-chart], [data-timeline]").count()
    assert num_charts >= 24
    assert reader.page.locator(".plot.js-plotly-plot").count() == num_charts
    assert reader.page.locator(".modebar-btn").count() == 0
    drawn = reader.page.evaluate(
        "[...document.querySelectorAll('.plot')].flatMap(plot => plot._fullData.map(trace => trace.type))"
    )
    assert set(drawn) == {"scatter", "bar"}
    assert set(drawn) <= set(reader.page.evaluate("Object.keys(Plotly.PlotSchema.get().traces)"))
    ink = "() => getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill"
    before = reader.page.evaluate(ink)
    reader.press("#theme")
    reader.drawn("dark")
    assert reader.page.evaluate(ink) != before
    reader.page.reload()
    reader.drawn("dark")
    assert reader.faults == []
    reader.close()


def test_a_legend_entry_switches_its_curve_off_and_on(read: Any) -> None:
    reader = read("whole")
    curves = reader.page.locator("#chart-throughput .scatterlayer .trace")
    entry = reader.page.locator("#chart-throughput .legend button").first
    assert curves.count() == 2
    reader.press("#chart-throughput .legend button")
    assert curves.count() == 1
    assert entry.get_attribute("aria-pressed") == "false"
    reader.press("#chart-throughput .legend button")
    assert curves.count() == 2
    assert reader.faults == []


def test_every_process_has_a_strip_with_its_name_and_its_waits(read: Any) -> None:
    reader = read("whole")
    names = reader.page.locator("#chart-timeline .annotation-text").all_text_contents()
    assert names == ["rollout-0", "rollout-1", "reward", "trainer", "trainer: packing", "controller"]
    legend = reader.page.locator("#chart-timeline .legend button").all_text_contents()
    assert {"wait:batch", "wait:score", "wait:work", "wait:requests", "generate"} <= set(legend)


def test_the_configuration_opens_and_scrolls_within_itself(read: Any) -> None:
    reader = read("hostile", PHONE, "dark")
    reader.press("#config summary")
    assert "max_staleness" in reader.page.inner_text("#config pre")
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert reader.faults == []


def test_answers_stand_next_to_each_other_on_a_desk_and_below_each_other_on_a_phone(read: Any) -> None:
    tops = (
        "[...document.querySelectorAll('#samples .pair:first-of-type .answer')].map(e => e.getBoundingClientRect().top)"
    )
    left, right = read("whole").page.evaluate(tops)
    assert left == right
    first, second = read("whole", PHONE, "dark").page.evaluate(tops)
    assert first < second


def test_without_javascript_words_and_numbers_are_there(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True, color_scheme="dark")
    page = context.new_page()
    page.goto(pages["whole"].as_uri())
    assert "samples/s" in page.inner_text("#numbers")
    assert page.inner_text("#diagnosis h1")
    assert "Charts need JavaScript" in page.inner_text("noscript")
    context.close()
