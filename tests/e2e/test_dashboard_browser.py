"""The dashboard in a real browser: content, phone and desk, light and dark, by keyboard, live, and hostile runs."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.dashboard.access import Access
from controller.dashboard.server import Dashboard

sys.path.insert(0, str(Path(__file__).parents[1] / "controller" / "support"))
import run_zoo as zoo
from made_run import step_rows
from report_run import HOSTILE, report_run
from test_report_browser import DESK, OVERLAPPING_LABELS, PHONE, STICKING_OUT

pytestmark = pytest.mark.e2e

TOKEN = "a-token-of-enough-signs"
HOSTILE_NAME = "a<b>&'\"x"
LONG_STEPS = 2000
TIMEOUT_MS = 500_000
"""Generous: it only bounds a hang. plotly alone takes seconds of processor time."""
CHOSEN_VERSIONS = """() => [...document.querySelectorAll('.answer pre span')]
    .map(span => [span.className, span.title, span.textContent])"""


IN_PROGRESS = """() => {
    state.refused = {};
    state.processes = [{ name: 'rollout-0', role: 'rollout' }, { name: 'rollout-1', role: 'rollout' }];
    document.dispatchEvent(new Event('run-changed'));
}"""
CONTROLS = """() => {
    const found = [...document.querySelectorAll('a[href], button, input, select, textarea, [tabindex="0"]')]
        .filter(one => !one.disabled && one.checkVisibility() && !one.closest('dialog:not([open])'));
    found.forEach((one, place) => { one.dataset.place = place; });
    return found.map(one => one.id || one.textContent.slice(0, 40));
}"""
FOCUS = """() => {
    const style = getComputedStyle(document.activeElement);
    return [Number(document.activeElement.dataset.place ?? -1), style.outlineStyle !== 'none'];
}"""
IN_DIALOG = """() => {
    const focused = document.activeElement;
    return focused.closest('dialog') ? focused.id || focused.textContent : '';
}"""
FOCUSED_ACTION = "() => document.activeElement.dataset.action || ''"


class Served:
    """A server in a thread, with ten runs."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        for number in range(7):
            report_run(runs, f"sums-{number}", num_steps=3, staleness=1 + number, has_traces=False, has_ledger=False)
        report_run(runs, "long", num_steps=LONG_STEPS, has_traces=False, has_ledger=False, status="running")
        report_run(runs, HOSTILE_NAME, num_steps=12, words=HOSTILE, has_traces=False)
        self.sampled = zoo.make_sampled_run(runs).name
        self.made = Dashboard(runs, Access(host="127.0.0.1", token=TOKEN, reads_need_token=False))
        self.asked: list[tuple[str, str, str]] = []
        self.made.actions.perform = self._perform  # type: ignore[method-assign]
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self._started.wait()

    async def _perform(self, folder: Any, action: str, worker: str = "") -> dict[str, Any]:
        self.asked.append((folder.name, action, worker))
        return {"is_done": True, "lines": [f"{action} <i>is done</i>"]}

    async def _serve(self) -> None:
        from aiohttp import web

        self._end = asyncio.Event()
        runner = self.made.runner()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._end.wait()
        await runner.cleanup()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("runs"))
    yield found
    found.end()


class Reader:
    """One page, and what went wrong in it."""

    def __init__(
        self, browser: Any, served: Served, path: str, viewport: dict[str, int], scheme: str, is_drawn: bool = True
    ) -> None:
        self.faults: list[str] = []
        is_phone = viewport is PHONE
        context = browser.new_context(
            viewport=viewport, color_scheme=scheme, is_mobile=is_phone, has_touch=is_phone, reduced_motion="reduce"
        )
        self.page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", lambda message: self.faults.append(f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self._asked(request.url, served.address))
        self.page.goto(served.address + path, wait_until="commit")
        self.page.wait_for_selector("body[data-seen]", state="attached")
        if path.startswith("/run/") and is_drawn:
            self.page.wait_for_selector(f"body[data-drawn={scheme}]", state="attached")

    def _asked(self, url: str, own: str) -> None:
        if not url.startswith((f"{own}/", "data:")):
            self.faults.append(f"asks for {url[:200]}")

    def press(self, selector: str) -> None:
        """Playwright's own click waits for animation frames, of which a busy headless browser may give none."""
        self.page.wait_for_selector(selector, state="attached")
        self.page.eval_on_selector(selector, "found => found.click()")

    def text(self, selector: str) -> str:
        return str(self.page.eval_on_selector(selector, "found => found.textContent"))

    def wait(self, expression: str) -> None:
        """Playwright's own waiting evaluates text in the page, which its content policy forbids."""
        deadline_s = time.monotonic() + TIMEOUT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline_s, f"{expression} did not become true"
            self.page.wait_for_timeout(100)


@pytest.fixture
def read(browser: Any, served: Served) -> Iterator[Any]:
    """read(path, viewport, scheme) opens one."""
    opened: list[Reader] = []

    def opens(path: str, viewport: dict[str, int] = DESK, scheme: str = "light", *, is_drawn: bool = True) -> Reader:
        opened.append(Reader(browser, served, path, viewport, scheme, is_drawn))
        return opened[-1]

    yield opens
    for reader in opened:
        reader.page.context.close()


SHOWN = {
    "/": ((DESK, "light"), (PHONE, "dark")),
    "/run/long": ((PHONE, "dark"),),
    "/run/a%3Cb%3E&'%22x": ((DESK, "dark"),),
    "/differences?run=sums-0&run=sums-3&run=long": ((DESK, "light"), (PHONE, "dark")),
}
"""A page of a run takes seconds to draw: on a desk in light colours `long` is another test's."""


def check_whole(reader: Reader, viewport: dict[str, int], scheme: str) -> None:
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert reader.page.evaluate(STICKING_OUT.replace("pre'", "pre, .answers, .groups, .skip, .runs thead'")) == []
    assert reader.page.evaluate(OVERLAPPING_LABELS) == []
    paper = reader.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(12, 14, 18)") == (scheme == "dark")
    assert reader.page.evaluate("document.querySelectorAll('main b, main i, main img, main script').length") == 0
    assert reader.faults == []


@pytest.mark.parametrize(
    ("path", "viewport", "scheme"),
    [(path, *how) for path, ways in SHOWN.items() for how in ways],
    ids=lambda value: str(value["width"]) if isinstance(value, dict) else value,
)
def test_a_page_is_whole_without_error_overflow_or_overlap(
    read: Any, path: str, viewport: dict[str, int], scheme: str
) -> None:
    check_whole(read(path, viewport, scheme), viewport, scheme)


def test_the_list_shows_ten_runs_with_their_states_and_a_link_each(read: Any, served: Served) -> None:
    reader = read("/")
    names = reader.page.eval_on_selector_all(".runs tbody a", "found => found.map(a => a.textContent)")
    assert sorted(names) == sorted([*(f"sums-{n}" for n in range(7)), "long", HOSTILE_NAME, served.sampled])
    kinds = reader.page.eval_on_selector_all(".runs .pill", "found => found.map(pill => pill.textContent)")
    assert sorted(set(kinds)) == ["crashed", "finished"]
    assert reader.text("#live") == "live"


def test_a_long_run_is_drawn_and_a_new_step_moves_its_curve(read: Any, served: Served) -> None:
    reader = read("/run/long")
    titles = reader.page.eval_on_selector_all("figure h3", "found => found.map(title => title.textContent)")
    assert {"Learning curve", "Tokens per second", "Staleness and its bound", "Answer length", "Memory"} <= set(titles)
    assert reader.page.locator(".plot .main-svg").count() >= 2 * len(titles)
    assert "Each point stands for 8 steps" in reader.text("#chart-entropy figcaption")
    assert "trainer waits for batch" in reader.text("#waits")
    assert "rollout-1 is lost" in reader.text("#events")
    assert "version 2000: scored 1it is 2000" in reader.text("#samples .pair")
    check_whole(reader, DESK, "light")
    with (served.runs / "long" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**step_rows(LONG_STEPS + 1, 4.0)[-1], "reward_mean": 0.123}) + "\n")
    reader.wait("[...document.querySelectorAll('.card')].some(card => card.textContent.startsWith('reward0.123'))")
    end = "page.charts['chart-entropy'].series[0].xs.at(-1)"
    assert reader.page.evaluate(end) == LONG_STEPS + 1
    reader.wait("document.body.dataset.drawn === 'light'")
    drawn = "document.querySelector('[data-chart=chart-entropy]').data[0].x.at(-1)"
    assert reader.page.evaluate(drawn) == LONG_STEPS + 1
    assert reader.faults == []


def test_answers_of_a_prompt_stand_next_to_each_other_coloured_by_version(read: Any, served: Served) -> None:
    reader = read(f"/run/{served.sampled}", is_drawn=False)
    assert reader.page.evaluate("document.querySelectorAll('#samples .pair').length") == 0
    reader.press("#samples button.plain")
    reader.press(".groups .group:last-child")
    reader.wait("document.querySelectorAll('.answer').length === 2")
    assert "<bos>2+2=" in reader.text(".prompt")
    spans = reader.page.evaluate(CHOSEN_VERSIONS)
    assert [span for span in spans if span[2] in ("東京", " five")] == [
        ["v0", "version 0", "東京"], ["v1", "version 1", " five"]
    ]  # fmt: skip
    colours = reader.page.evaluate(
        "() => ['v0', 'v1'].map(name => getComputedStyle(document.querySelector(`.answer .${name}`)).backgroundColor)"
    )
    assert colours[0] != colours[1]
    tops = reader.page.eval_on_selector_all(".answer", "found => found.map(one => one.getBoundingClientRect().top)")
    assert tops[0] == tops[1]
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= DESK["width"]
    assert reader.faults == []


def test_an_action_asks_for_confirmation_and_token_and_shows_its_words(read: Any, served: Served) -> None:
    served.asked.clear()
    reader = read("/run/sums-1", is_drawn=False)
    assert reader.page.eval_on_selector_all("#actions button:not(dialog *)", "found => found.every(b => b.disabled)")
    assert reader.text("#actions-note") == "checkpoint, stop, drain, add: the run is not in progress"
    reader.page.evaluate("state.refused = { stop: 'only there' }; document.dispatchEvent(new Event('run-changed'))")
    disabled = "found => found.filter(one => one.disabled).map(one => one.dataset.action)"
    assert reader.page.eval_on_selector_all("[data-action]", disabled) == ["stop"]
    assert reader.text("#actions-note") == "stop: only there"
    reader.page.evaluate(IN_PROGRESS)
    assert not reader.page.is_visible("#actions-note")
    reader.press("[data-action=stop]")
    assert reader.page.evaluate("document.querySelector('dialog').open")
    assert "the run ends" in reader.text("dialog")
    assert served.asked == []
    reader.page.keyboard.press("Escape")
    reader.wait("!document.querySelector('dialog').open")
    assert served.asked == []
    for token, words in (("wrong", "the token is wrong"), (TOKEN, "stop <i>is done</i>")):
        reader.press("[data-action=stop]")
        reader.page.evaluate("token => { document.getElementById('confirm-token').value = token; }", token)
        reader.press("#confirm-go")
        reader.wait(f"document.querySelector('.result').textContent.includes({words!r})")
    assert served.asked == [("sums-1", "stop", "")]
    assert [fault for fault in reader.faults if "403" not in fault] == []


def test_everything_is_reached_by_keyboard(read: Any) -> None:
    reader = read("/")
    seen = []
    for _ in range(5):
        reader.page.keyboard.press("Tab")
        seen.append(reader.page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert seen[0] == "A"
    assert seen[1:3] == ["brand", "theme"]
    reader.page.keyboard.press("Tab")
    reader.page.evaluate("document.querySelector('.runs tbody a').focus()")
    outline = reader.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_url("**/run/**", wait_until="commit")


def tab_until(reader: Reader, expression: str, wanted: str) -> None:
    """Press Tab until the focus is there."""
    for _ in range(200):
        if reader.page.evaluate(expression) == wanted:
            return
        reader.page.keyboard.press("Tab")
    raise AssertionError(f"{wanted} is not reached by Tab")


def test_tab_reaches_every_control_of_a_run_and_shows_where_it_is(read: Any, served: Served) -> None:
    reader = read(f"/run/{served.sampled}", is_drawn=False)
    reader.page.evaluate(IN_PROGRESS)
    reader.press("#samples button.plain")
    reader.press(".groups .group:last-child")
    reader.wait("document.querySelectorAll('.answer').length === 2")
    reader.page.evaluate("document.activeElement.blur()")
    names = reader.page.evaluate(CONTROLS)
    assert {"theme", "sample-step", "log-process", "checkpoint", "stop", "drain", "add"} <= set(names)
    seen, without_outline = set(), set()
    for _ in range(2 * len(names) + 10):  # an area that scrolls has a place of its own
        reader.page.keyboard.press("Tab")
        place, has_outline = reader.page.evaluate(FOCUS)
        seen.add(place)
        if place >= 0 and not has_outline:
            without_outline.add(names[place])
    assert [name for place, name in enumerate(names) if place not in seen] == []
    assert without_outline == set()
    assert reader.faults == []


def test_the_confirmation_is_used_by_keyboard_and_gives_the_focus_back(read: Any, served: Served) -> None:
    served.asked.clear()
    reader = read("/run/sums-1", is_drawn=False)
    reader.page.evaluate(IN_PROGRESS)
    keyboard = reader.page.keyboard
    tab_until(reader, FOCUSED_ACTION, "stop")
    for leave in ("Escape", "cancel"):
        keyboard.press("Enter")
        assert reader.page.evaluate(IN_DIALOG) == "confirm-token"
        if leave == "cancel":
            tab_until(reader, IN_DIALOG, "cancel")
        keyboard.press("Escape" if leave == "Escape" else "Enter")
        reader.wait("!document.querySelector('dialog').open")
        assert reader.page.evaluate(FOCUSED_ACTION) == "stop"
    assert served.asked == []
    tab_until(reader, FOCUSED_ACTION, "drain")
    keyboard.press("Enter")
    tab_until(reader, IN_DIALOG, "confirm-worker")
    keyboard.press("ArrowDown")
    tab_until(reader, IN_DIALOG, "confirm-token")
    keyboard.type(TOKEN)
    tab_until(reader, IN_DIALOG, "confirm-go")
    keyboard.press("Enter")
    reader.wait("document.querySelector('.result').textContent.includes('is done')")
    assert served.asked == [("sums-1", "drain", "rollout-1")]
    assert reader.page.evaluate(FOCUSED_ACTION) == "drain"
    assert reader.faults == []


def test_a_tab_that_nobody_looks_at_is_no_viewer(read: Any, served: Served) -> None:
    reader = read("/")
    before = set(served.made.feeds[""].viewers)
    assert before
    hide = """isHidden => {
        Object.defineProperty(document, 'hidden', { configurable: true, get: () => isHidden });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    reader.page.evaluate(hide, True)
    reader.wait("document.getElementById('live').textContent === 'paused'")
    while before & served.made.feeds[""].viewers:
        reader.page.wait_for_timeout(50)
    reader.page.evaluate(hide, False)
    reader.wait("document.getElementById('live').textContent === 'live'")
    assert reader.faults == []


def test_two_chosen_runs_are_compared(read: Any) -> None:
    reader = read("/")
    for name in ("sums-0", "sums-3"):
        reader.press(f"[aria-label='choose {name}']")
    reader.press(".bar button")
    reader.page.wait_for_url("**/differences?run=sums-0&run=sums-3", wait_until="commit")
    reader.wait("document.querySelector('.differences')")
    rows = reader.page.eval_on_selector_all(
        ".differences tbody tr", "found => found.map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert ["staleness.max_staleness", "1", "4"] in rows
    assert reader.faults == []


def test_a_run_that_is_not_there_and_a_server_that_has_ended_are_said(browser: Any, tmp_path: Path) -> None:
    served = Served(tmp_path)
    reader = Reader(browser, served, "/", DESK, "light")
    try:
        answer = reader.page.context.new_page()
        answer.goto(f"{served.address}/run/absent")
        assert "there is no run 'absent'" in answer.inner_text("body")
    finally:
        served.end()
    reader.wait("document.getElementById('live').textContent.startsWith('no connection')")
    reader.page.context.close()
