"""Notices that a machine will be taken away: which counts, and what is asked of a metadata server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pydantic
import pytest

from rollout import __main__ as main_module
from rollout import preemption
from rollout.preemption import TOKEN, PreemptionSettings, look, notice


class Metadata(BaseHTTPRequestHandler):
    """A cloud's metadata server on loopback. `replies` by path: status and body."""

    replies: ClassVar[dict[str, tuple[int, str]]] = {}
    requests: ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    def do_GET(self) -> None:
        type(self).requests.append((self.command, self.path, dict(self.headers)))
        status, body = self.replies.get(self.path, (404, ""))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.replies, Metadata.requests = {}, []
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def looked(**settings: Any) -> str | None:
    return asyncio.run(look(PreemptionSettings(**settings)))


def test_a_file_is_a_notice_when_it_exists(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    assert looked(file=str(file)) == ""
    file.touch()
    assert looked(file=str(file)) == f"{file} exists"


def test_a_reply_is_a_notice_when_it_has_the_text(metadata: str) -> None:
    settings = {"url": f"{metadata}/preempted", "match": "TRUE", "headers": {"Metadata-Flavor": "Google"}}
    Metadata.replies["/preempted"] = (200, "FALSE")
    assert looked(**settings) == ""
    Metadata.replies["/preempted"] = (200, "TRUE")
    assert looked(**settings) == f"{metadata}/preempted says TRUE"
    assert Metadata.requests[0][2]["Metadata-Flavor"] == "Google"


def test_without_a_text_any_reply_is_a_notice_and_404_is_none(metadata: str) -> None:
    assert looked(url=f"{metadata}/action") == ""
    Metadata.replies["/action"] = (200, '{"action": "terminate"}')
    assert looked(url=f"{metadata}/action") == f'{metadata}/action says {{"action": "terminate"}}'


@pytest.mark.parametrize("status", [302, 401, 500])
def test_a_request_that_fails_says_nothing(metadata: str, status: int) -> None:
    Metadata.replies |= {"/action": (status, "x"), "/elsewhere": (200, "a redirect was followed")}
    assert looked(url=f"{metadata}/action") is None


def test_a_server_that_is_not_there_says_nothing() -> None:
    assert looked(url="http://127.0.0.1:9/action") is None


def test_a_token_is_requested_first_and_sent_along(metadata: str) -> None:
    Metadata.replies |= {"/token": (200, "abc"), "/action": (200, "x")}
    assert looked(url=f"{metadata}/action", token_url=f"{metadata}/token")
    (first, second) = Metadata.requests
    assert (first[0], first[1]) == ("PUT", "/token")
    assert {key.lower(): value for key, value in second[2].items()}[TOKEN.lower()] == "abc"


def waited(looks: list[str | None]) -> tuple[str, int, list[str]]:
    """What a worker that looks so often acts on, after how many looks, and what it reports as ignored."""
    ignored: list[str] = []
    left = list(looks)

    async def next_look(settings: PreemptionSettings) -> str | None:
        return left.pop(0)

    async def sleep(seconds: float) -> None:
        assert seconds == 3.0

    found = asyncio.run(notice(PreemptionSettings(file="x", poll_s=3.0), ignored.append, look=next_look, sleep=sleep))
    return found, len(looks) - len(left), ignored


@pytest.mark.parametrize(
    ("looks", "num_looks"),
    [
        (["", "it", "x"], 2),
        ([None, "", "it"], 3),
        (["it", "it", "", "it"], 4),
        (["it", None, "it", "", None, "it"], 6),
        (["", None, "it"], 3),
    ],
)
def test_a_notice_counts_when_it_was_absent_before(looks: list[str | None], num_looks: int) -> None:
    found, count, ignored = waited(looks)
    assert (found, count) == ("it", num_looks)
    assert len(ignored) == (looks[0] == "it"), "said once"


def test_an_address_that_never_answers_does_not_hide_the_file() -> None:
    looks = {"file": ["", "it"], "url": [None] * 20}

    async def next_look(settings: PreemptionSettings) -> str | None:
        assert bool(settings.file) != bool(settings.url), "each is watched on its own"
        return looks["file" if settings.file else "url"].pop(0)

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    async def test() -> str:
        settings = PreemptionSettings(file="x", url="http://127.0.0.1:9/x")
        found = await notice(settings, ignored.append, look=next_look, sleep=sleep)
        assert len(asyncio.all_tasks()) <= 2, "the other watch ends"
        return found

    ignored: list[str] = []
    assert (asyncio.run(test()), ignored) == ("it", [])


def test_a_file_that_may_not_be_looked_at_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    assert looked(file="/x/notice") is None


def test_a_look_that_hangs_does_not_delay_the_end_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(settings: PreemptionSettings) -> None:
        begun.set()
        release.wait()
        ended.set()

    async def test() -> None:
        watch = asyncio.create_task(notice(PreemptionSettings(file="x"), lambda text: None))
        await asyncio.to_thread(begun.wait)
        watch.cancel()

    monkeypatch.setattr(preemption, "_look", hang)
    asyncio.run(test())
    assert not ended.is_set(), "the loop is closed while the look hangs"
    release.set()
    assert ended.wait(10.0)


def test_a_reply_in_small_pieces_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=iter((0.0, 1.0, 3.0)).__next__))
    part = SimpleNamespace(read1=lambda num_bytes: b"x")
    opener = SimpleNamespace(open=lambda request, timeout: contextlib.nullcontext(part))
    monkeypatch.setattr(preemption, "_OPENER", opener)
    assert looked(url="http://metadata/action") is None


@pytest.mark.parametrize(
    "settings",
    [{"url": "ftp://x"}, {"match": "TRUE"}, {"headers": {"a": "b"}}, {"token_url": "http://x"}, {"poll_s": 0.0},
     {"url": "http://x", "token_url": "x"}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        PreemptionSettings(**settings)


def test_nothing_is_looked_at_where_nothing_is_configured() -> None:
    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        raise Enough

    with pytest.raises(Enough):
        asyncio.run(notice(PreemptionSettings(), lambda text: None, look=None, sleep=sleep))  # type: ignore[arg-type]


def test_a_notice_stops_the_worker_as_sigterm_does_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def noticed(settings: PreemptionSettings, report: Callable[[str], None]) -> str:
        return "/run/notice exists"

    async def test() -> None:
        stop, reports = asyncio.Event(), list[str]()
        await main_module._stop_on_notice(PreemptionSettings(file="/run/notice"), stop, reports.append)
        assert stop.is_set()
        assert reports == ["preemption notice: /run/notice exists; the worker drains"]

    monkeypatch.setattr(main_module, "notice", noticed)
    asyncio.run(test())
