"""The page on which labels are reviewed: each decision is in the file at once, and the set is what relabel writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from areal_like.errors import UserError
from controller.cli.main import main
from controller.dashboard.access import COOKIE, HEADERS, TOKEN_HEADER, Access
from controller.dashboard.pages import asset
from controller.dashboard.review import ReviewFile, ReviewPage, Target, review_command

TOKEN = "a-token-of-enough-signs"
HOSTILE = "<script>alert(1)</script>\u2028\x85"


@pytest.fixture
def review(tmp_path: Path) -> Path:
    """Rows 1 and 3 of three have a wrong label."""
    rows = [{"prompt": f"{HOSTILE} {n}+1=", "answer": str(n), "id": n} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [
        {
            "where": f"{tmp_path / 'train.jsonl'}:{n + 1}", "key": "", "prompt": rows[n]["prompt"], "label": str(n),
            "answer": str(n + 1), "num_answers": 8, "num_agree": 7, "num_label": 1, "versions": [3, 9], "samples": [],
            "decision": None,
        }
        for n in (0, 2)
    ]  # fmt: skip
    path = tmp_path / "review.jsonl"
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in entries), encoding="utf-8")
    path.chmod(0o640)
    return path


def decisions(review: Path) -> list[str | None]:
    return [json.loads(line)["decision"] for line in review.read_text().split("\n")[:-1]]


def mode(path: Path) -> int:
    return path.stat().st_mode


def text(path: Path) -> str:
    return path.read_text()


def changed(path: Path) -> str:
    """Change the file as another program would; its new text."""
    path.write_text(path.read_text().replace("null", '"remove"', 1))
    return path.read_text()


def on_page(
    review: Path, scene: Callable[[aiohttp.ClientSession], Awaitable[None]], target: Target | None = None
) -> None:
    async def whole() -> None:
        made = ReviewPage(ReviewFile(review), Access("127.0.0.1", TOKEN, True), target)
        runner = web.AppRunner(made.application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        headers = {TOKEN_HEADER: TOKEN}
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}", headers=headers) as client:
                await scene(client)
        finally:
            await runner.cleanup()

    asyncio.run(whole())


async def decide(client: aiohttp.ClientSession, number: Any, decision: Any) -> tuple[int, dict[str, Any]]:
    async with client.post("/decisions", json={"number": number, "decision": decision}) as answer:
        return answer.status, await answer.json()


def test_a_decision_is_in_the_file_at_once_and_can_be_taken_back(review: Path) -> None:
    async def scene(client: aiohttp.ClientSession) -> None:
        before = mode(review)
        async with client.get("/rows") as answer:
            found = await answer.json()
        assert [(row["number"], row["label"], row["answer"]) for row in found["rows"]] == [(0, "0", "1"), (1, "2", "3")]
        assert (found["counts"], found["folder"]) == ({"undecided": 2}, None)
        assert await decide(client, 1, "accept") == (200, {"counts": {"undecided": 1, "accept": 1}})
        assert decisions(review) == [None, "accept"]
        assert mode(review) == before
        assert (await decide(client, 1, None))[1]["counts"] == {"undecided": 2}
        assert decisions(review) == [None, None]

    on_page(review, scene)


def test_what_no_page_sends_is_refused_and_changes_nothing(review: Path) -> None:
    async def scene(client: aiohttp.ClientSession) -> None:
        for number, decision in ((7, "accept"), (0, "maybe"), (True, "accept"), ("0", "accept"), (0, 3)):
            assert (await decide(client, number, decision))[0] >= 400
        async with client.post("/decisions", data="number=0") as answer:
            assert answer.status == 415
        async with client.post("/decisions", json={"number": 0}, headers={"Origin": "http://evil"}) as answer:
            assert answer.status == 403
        async with client.post("/set", json={}) as answer:
            assert answer.status == 409

    on_page(review, scene)
    assert decisions(review) == [None, None]


def test_nobody_without_the_token_sees_or_changes_anything(review: Path) -> None:
    async def scene(client: aiohttp.ClientSession) -> None:
        for path in ("/", "/rows", "/static/review.js"):
            async with client.get(path, headers={TOKEN_HEADER: "wrong"}) as answer:
                assert answer.status == 401
                assert "areal-like data review" in await answer.text()
        async with client.post(
            "/decisions", json={"number": 0, "decision": "accept"}, headers={TOKEN_HEADER: "x"}
        ) as one:
            assert one.status == 401
        async with client.get("/") as answer:
            page = await answer.text()
            assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
        assert "/static/review.js" in page
        assert HOSTILE not in page

    on_page(review, scene)
    assert decisions(review) == [None, None]


def test_the_cookie_is_not_that_of_a_dashboard_on_the_same_host(review: Path) -> None:
    async def scene(client: aiohttp.ClientSession) -> None:
        async with client.get(f"/?token={TOKEN}", allow_redirects=False) as answer:
            assert list(answer.cookies) == [f"{COOKIE}_data_review"]

    on_page(review, scene)


def test_the_button_of_the_decision_looks_different() -> None:
    assert '.plain[aria-pressed="true"]' in asset("dashboard.css")[0].decode()


def test_a_file_that_another_program_changed_is_not_overwritten(review: Path) -> None:
    async def scene(client: aiohttp.ClientSession) -> None:
        lines = changed(review)
        status, found = await decide(client, 1, "accept")
        assert status == 409
        assert "changed by another program" in found["error"]
        assert text(review) == lines

    on_page(review, scene)


def test_the_page_writes_the_new_set_with_the_decisions_so_far(review: Path) -> None:
    folder = review.parent / "new"
    target = Target([str(review.parent / "train.jsonl")], folder)

    async def scene(client: aiohttp.ClientSession) -> None:
        await decide(client, 0, "accept")
        await decide(client, 1, "remove")
        async with client.post("/set", json={}) as answer:
            assert (await answer.json())["words"].startswith("3 rows, 1 with a new label; written to")
        async with client.post("/set", json={}) as answer:
            assert answer.status == 404  # it exists by now
            assert "exists" in (await answer.json())["error"]

    on_page(review, scene, target)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().split("\n")[:-1]]
    assert [(row["id"], row["answer"]) for row in rows] == [(0, "1"), (1, "1")]


def test_a_users_mistakes_are_named_before_the_page_is_served(
    review: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "review", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["data", "review", str(review), "-o", str(tmp_path / "x")]) == 2
    assert "must be specified together" in capsys.readouterr().err
    assert main(["data", "review", str(review), str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "x")]) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "review", str(review), "--port", "70000"])
    assert "not a port number" in capsys.readouterr().err
    with pytest.raises(UserError, match="the folder already exists"):
        review_command(str(review), host="127.0.0.1", port=0, token=None, target=Target(["x"], tmp_path))
