"""The documentation site as a reader meets it: built, served on loopback, every page and link opened in a browser."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

REPOSITORY = Path(__file__).resolve().parents[2]
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
PAGE_TIMEOUT_MS = 60_000
"""Generous: it only bounds a hang."""
WIDEST = """() => [...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(e).position !== 'fixed')
    .slice(0, 5).map(e => e.tagName + '.' + e.className + ': ' + (e.textContent || '').trim().slice(0, 60))"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the screen."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, built with every warning an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=REPOSITORY, env=dict(os.environ, NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Unsearchable(_Quiet):
    """Without what the search looks through: every page would read 0.8 MB of it, which is half of its time."""

    def do_GET(self) -> None:
        if not self.path.startswith("/search/search_index.json"):
            return super().do_GET()
        index = json.loads((Path(self.directory) / "search" / "search_index.json").read_text())
        body = json.dumps({**index, "docs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "max-age=600")  # all pages have the same scripts
        super().end_headers()


@contextlib.contextmanager
def served(site: Path, handling: type[_Quiet]) -> Iterator[str]:
    """The address of a server on loopback."""
    handler = functools.partial(handling, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join(300.0)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with served(site, _Quiet) as found:
        yield found


@pytest.fixture
def unsearchable(site: Path) -> Iterator[str]:
    """Where it is served for a reader of every page; another test searches."""
    with served(site, _Unsearchable) as found:
        yield found


class Reader:
    """A browser that remembers what went wrong."""

    def __init__(self, browser: object, address: str, viewport: dict[str, int], scheme: str) -> None:
        self.address, self.faults = address, []  # type: ignore[var-annotated]
        self.page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[attr-defined]
        self.page.set_default_timeout(PAGE_TIMEOUT_MS)
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("pageerror", lambda error: self.faults.append(f"{self.page.url}: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("response", lambda response: self._answered(response.status, response.url))

    def _said(self, kind: str, text: str) -> None:
        if kind == "error":
            self.faults.append(f"{self.page.url}: console: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.address, "data:", "blob:")):
            self.faults.append(f"{self.page.url} asks the network for {url}")

    def _answered(self, status: int, url: str) -> None:
        if status >= 400:
            self.faults.append(f"{self.page.url}: {status} for {url}")

    def open(self, url: str) -> tuple[set[str], set[str]]:
        """Links (absolute, fragments included) and ids of a page."""
        self.page.goto(url, wait_until="load")
        links = set(self.page.eval_on_selector_all("a[href]", "found => found.map(a => a.href)"))
        ids = set(self.page.eval_on_selector_all("[id]", "found => found.map(e => e.id)"))
        return {link for link in links if link.startswith(self.address)}, ids


def test_every_page_and_link_opens_without_error_network_or_sideways_scrolling(
    browser: object, site: Path, unsearchable: str
) -> None:
    address = unsearchable
    reader = Reader(browser, address, PHONE, "light")
    ids_of: dict[str, set[str]] = {}
    asked: set[tuple[str, str, str]] = set()
    waiting = [address]
    while waiting:
        url = waiting.pop()
        if url in ids_of:
            continue
        links, ids_of[url] = reader.open(url)
        width = reader.page.evaluate("document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            reader.faults.append(f"{url} is {width} px wide: {reader.page.evaluate(WIDEST)}")
        for link in links:
            target, fragment = urldefrag(link)
            asked.add((url, target, unquote(fragment)))
            if target not in ids_of and target.endswith(("/", ".html")):
                waiting.append(target)
    for url, target, fragment in sorted(asked):
        if fragment and target in ids_of and fragment not in ids_of[target]:
            reader.faults.append(f"{url}: {target} has no #{fragment}")
    assert not reader.faults, "\n".join(reader.faults)
    pages = {f"{address}{path.parent.relative_to(site).as_posix()}/" for path in site.rglob("index.html")}
    assert {url.replace("/./", "/") for url in pages} == set(ids_of), "a page that no link leads to"


def test_search_finds_without_network(browser: object, address: str) -> None:
    reader = Reader(browser, address, DESK, "light")
    reader.open(address)
    reader.page.click("label.md-header__button[for=__search]") if not reader.page.is_visible(
        "input.md-search__input"
    ) else reader.page.click("input.md-search__input")
    reader.page.keyboard.type("staleness", delay=20)
    reader.page.wait_for_selector(".md-search-result__item a", state="attached")
    assert not reader.faults, "\n".join(reader.faults)


def test_theme_switch_changes_the_pictures_ink(browser: object, address: str) -> None:
    reader = Reader(browser, address, DESK, "light")
    reader.open(f"{address}concepts/")
    ink = "getComputedStyle(document.querySelector('svg.system .name')).fill"
    light = reader.page.evaluate(ink)
    reader.page.click("label[title='Switch to dark']")
    reader.page.wait_for_function(f"{ink} !== {light!r}")
    assert not reader.faults, "\n".join(reader.faults)
