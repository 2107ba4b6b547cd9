"""Claims about the routes, asked over real HTTP on the loopback interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from report_run import report_run

from controller.dashboard.access import COOKIE, HEADERS, TOKEN_HEADER, Access
from controller.dashboard.actions import Busy
from controller.dashboard.pages import STATIC
from controller.dashboard.server import Dashboard
from controller.run_folder.run_folder import RunFolder

TOKEN = "a-token-of-enough-signs"
HOSTILE_NAME = "a<b>&'\"x"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("mine", HOSTILE_NAME):
        report_run(folder, name, num_steps=3, has_traces=False, has_ledger=False)
    return folder


def ask(
    runs, scene: Callable[[aiohttp.ClientSession, Dashboard], Awaitable[None]], *, token: str | None = None
) -> None:
    """Run a scene against a server over `runs`."""

    async def whole() -> None:
        made = Dashboard(runs, Access.of("127.0.0.1", token))
        runner = made.runner()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address, jar = f"http://127.0.0.1:{runner.addresses[0][1]}", aiohttp.DummyCookieJar()
        try:
            async with aiohttp.ClientSession(address, cookie_jar=jar) as client:
                await scene(client, made)
        finally:
            await runner.cleanup()

    asyncio.run(whole())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def first_event(answer: aiohttp.ClientResponse) -> tuple[str, dict]:
    event, data = await answer.content.readline(), await answer.content.readline()
    await answer.content.readline()
    return event.decode().split(": ", 1)[1].strip(), json.loads(data.decode().removeprefix("data: "))


def test_every_answer_carries_the_policies(runs):
    async def scene(client, _):
        for path in ("/", "/run/mine", "/static/dashboard.js", "/run/absent", "/nowhere", "/static/no.js"):
            async with client.get(path) as answer:
                assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS), path
        async with client.get("/events") as answer:
            assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
            assert answer.headers["Content-Type"].startswith("text/event-stream")

    ask(runs, scene)


def test_the_list_streams_every_run_and_its_changes(runs, monkeypatch):
    monkeypatch.setattr("controller.dashboard.feed.MIN_PAUSE_S", 0.01)

    async def scene(client, made):
        async with client.get("/events") as answer:
            event, found = await first_event(answer)
            assert event == "snapshot"
            assert {row["name"] for row in found["runs"]} == {"mine", HOSTILE_NAME}
            RunFolder.create(runs, "fresh").write_state("running")
            event, found = await first_event(answer)
            assert (event, found["runs"][0]["name"]) == ("change", "fresh")
        await until(lambda: not made.feeds[""].viewers)  # the browser is gone: so is the work for it
        assert made.feeds[""]._task is None

    ask(runs, scene)


def test_a_page_holds_no_markup_of_a_run(runs):
    async def scene(client, _):
        async with client.get("/run/a%3Cb%3E&'%22x") as answer:
            page = await answer.text()
            assert answer.status == 200
        assert "<b>" not in page
        assert "a&lt;b&gt;" in page

    ask(runs, scene)


@pytest.mark.parametrize("path", ["/run/absent", "/run/..%2Fmine", "/run/mine%2F..%2Fmine", "/run/absent/events"])
def test_an_unknown_run_is_one_sentence_as_a_page_and_as_json(runs, path):
    async def scene(client, _):
        for accept, begin in (("text/html", "<!doctype html>"), ("application/json", '{"error"')):
            async with client.get(path, headers={"Accept": accept}) as answer:
                words = await answer.text()
                assert answer.status == 404
                assert words.startswith(begin)
                assert "there is no run" in words

    ask(runs, scene)


def test_every_file_is_served_with_its_type_and_a_tag(runs):
    async def scene(client, _):
        for name, kind in STATIC.items():
            async with client.get(f"/static/{name}") as answer:
                assert answer.status == 200
                assert answer.content_type == kind
                assert await answer.read()
            async with client.get(f"/static/{name}", headers={"If-None-Match": answer.headers["ETag"]}) as again:
                assert again.status == 304
        for name in ("shell.html.j2", "..%2Fserver.py", "absent"):
            async with client.get(f"/static/{name}") as answer:
                assert answer.status == 404

    ask(runs, scene)


def test_a_request_under_a_foreign_name_is_refused(runs):
    async def scene(client, _):
        for path in ("/", "/events", "/static/dashboard.js"):
            async with client.get(path, headers={"Host": "evil.example"}) as answer:
                assert answer.status == 421
                assert "does not belong to this server" in (await answer.json())["error"]

    ask(runs, scene)


def test_without_the_token_nothing_is_read_and_the_answer_says_where_it_is(runs):
    async def scene(client, _):
        for path in ("/", "/events", "/run/mine", "/static/dashboard.js"):
            async with client.get(path) as answer:
                assert answer.status == 401
                assert "needs a token; open the address" in (await answer.json())["error"]
        for where in ({"params": {"token": "wrong"}}, {"headers": {"Cookie": f"{COOKIE}=wrong"}}):
            async with client.get("/", **where) as answer:
                assert answer.status == 401
                assert "the token is wrong" in (await answer.json())["error"]

    ask(runs, scene, token=TOKEN)


def test_the_token_moves_from_the_address_into_a_cookie_that_scripts_cannot_read(runs):
    async def scene(client, _):
        async with client.get("/run/mine", params={"token": TOKEN}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/run/mine")
            cookie = answer.headers["Set-Cookie"]
        async with client.get("/run/a%3Cb%3E&'%22x", params={"token": TOKEN}, allow_redirects=False) as answer:
            assert answer.headers["Location"].startswith("/run/a%3Cb%3E&")
        async with client.get("/absent", params={"token": TOKEN}, allow_redirects=False) as answer:
            assert answer.status == 401
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        async with client.get("/run/mine", headers={"Cookie": cookie.split(";")[0]}) as answer:
            assert answer.status == 200

    ask(runs, scene, token=TOKEN)


def test_more_viewers_than_the_limit_are_refused_in_words(runs, monkeypatch):
    monkeypatch.setattr("controller.dashboard.server.MAX_VIEWERS", 2)

    async def scene(client, _):
        async with client.get("/events") as one, client.get("/events") as two:
            await first_event(one)
            await first_event(two)
            async with client.get("/events") as three:
                assert three.status == 503
                assert "close some" in (await three.json())["error"]

    ask(runs, scene)


def test_an_error_of_ours_is_an_answer_too(runs, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("division by zero")

    async def scene(client, _):
        for path in ("/run/mine", "/events"):
            async with client.get(path) as answer:
                assert answer.status == 500
                assert "the request failed (division by zero)" in (await answer.json())["error"]
                assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]

    monkeypatch.setattr("controller.dashboard.server.find_run", fail)
    monkeypatch.setattr("controller.dashboard.server.RunList", fail)
    ask(runs, scene)


def test_nothing_but_get_is_answered_on_a_page(runs):
    async def scene(client, _):
        for method in ("POST", "PUT", "DELETE"):
            async with client.request(method, "/") as answer:
                assert answer.status == 405

    ask(runs, scene)


async def act(client, name: str = "mine", action: str = "stop", body: object = None, **headers: str):
    """Status and content of the answer to an action."""
    given = {"Content-Type": "application/json", TOKEN_HEADER: TOKEN, **headers}
    data = json.dumps({} if body is None else body)
    async with client.post(f"/run/{name}/actions/{action}", data=data, headers=given) as answer:
        return answer.status, await answer.json()


def test_an_action_runs_its_command_and_returns_its_words(runs):
    asked = []

    async def scene(client, made):
        async def perform(folder, action, worker):
            asked.append((folder.name, action, worker))
            return {"is_done": True, "lines": ["saved"]}

        made.actions.perform = perform
        assert await act(client) == (200, {"is_done": True, "lines": ["saved"]})
        assert (await act(client, action="drain", body={"worker": "rollout-1"}))[0] == 200
        assert asked == [("mine", "stop", ""), ("mine", "drain", "rollout-1")]

    ask(runs, scene, token=TOKEN)


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({TOKEN_HEADER: "wrong"}, 403, "the token is wrong"),
        ({TOKEN_HEADER: ""}, 403, "the token is wrong"),
        ({"Origin": "http://evil.example"}, 403, "a different origin"),
        ({"Origin": "null"}, 403, "a different origin"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "a different origin"),
        ({"Content-Type": "text/plain"}, 415, "send JSON"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "send JSON"),
    ],
)
def test_an_action_of_another_site_or_without_the_token_does_nothing(runs, headers, status, words):
    async def scene(client, made):
        made.actions.perform = None  # would fail
        given = {"Cookie": f"{COOKIE}={TOKEN}", **headers}
        found, content = await act(client, **given)
        assert found == status
        assert words in content["error"]

    ask(runs, scene, token=TOKEN)


def test_the_token_in_an_address_or_a_cookie_is_none_for_an_action(runs):
    async def scene(client, _):
        headers = {"Content-Type": "application/json", "Cookie": f"{COOKIE}={TOKEN}"}
        async with client.post("/run/mine/actions/stop", params={"token": TOKEN}, data="{}", headers=headers) as answer:
            assert answer.status == 403

    ask(runs, scene, token=TOKEN)


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"action": "resume"}, 404, "there is no action"),
        ({"action": "drain"}, 404, "the request does not name a rollout worker"),
        ({"name": "absent"}, 404, "there is no run"),
        ({"body": []}, 400, "not a JSON object"),
        ({"body": {"worker": 1}}, 400, "worker"),
    ],
)
def test_a_bad_request_is_one_sentence(runs, request_, status, words):
    async def scene(client, _):
        found, content = await act(client, **request_)
        assert found == status
        assert words in content["error"]

    ask(runs, scene, token=TOKEN)


def test_an_action_on_a_busy_run_is_a_conflict(runs):
    async def scene(client, made):
        async def perform(folder, action, worker):
            raise Busy("another action on this run is still in progress", where=folder.name)

        made.actions.perform = perform
        status, content = await act(client)
        assert status == 409
        assert "is still in progress" in content["error"]

    ask(runs, scene, token=TOKEN)


def test_the_page_of_a_run_streams_its_content(runs):
    async def scene(client, made):
        async with client.get("/run/mine/events") as answer:
            event, found = await first_event(answer)
            assert event == "snapshot"
            assert {"run", "cards", "charts", "timeline", "events", "log"} <= set(found)
        await until(lambda: not made.feeds["mine"].viewers)

    ask(runs, scene)


def test_samples_and_settings_are_answered_or_refused_in_words(runs):
    async def scene(client, _):
        for path, status, words in (
            ("/run/mine/groups", 404, "has no ledger"),
            ("/run/mine/groups?step=x", 400, "whole number"),
            ("/run/mine/groups/abc", 404, "Not Found"),
            ("/run/absent/groups", 404, "there is no run"),
            ("/differences/rows?run=mine", 404, "select 2 to 12"),
        ):
            async with client.get(path) as answer:
                assert answer.status == status, path
                assert words in (await answer.json())["error"], path
        async with client.get("/differences/rows", params=[("run", "mine"), ("run", HOSTILE_NAME)]) as answer:
            assert [run["name"] for run in (await answer.json())["runs"]] == ["mine", HOSTILE_NAME]
        async with client.get("/differences") as answer:
            assert answer.status == 200

    ask(runs, scene)
