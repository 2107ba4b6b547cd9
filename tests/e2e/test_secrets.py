"""Twenty secrets are planted around a real run: none is in a file of it, in its output, or in the dashboard."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from controller.cli.main import main
from controller.dashboard.access import Access
from controller.dashboard.server import Dashboard

pytestmark = pytest.mark.e2e

ENVIRONMENT = [
    "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN",
    "AREAL_LIKE_DASHBOARD_TOKEN", "UNUSED_PASSWORD",
]  # fmt: skip
"""Only there."""
USED = ["SERVICE_TOKEN", "LOGGED_PASSWORD", "RAISED_API_KEY", "DATABASE_URL", "ROWS_SECRET", "CAUSE_KEY"]
"""Read by the user's modules, which put them into exceptions and logs."""
ENDPOINTS = ["SCORES_KEY", "ECHOED_KEY", "key file"]
"""Keys of two servers, one of which repeats it in its refusals, and in a file."""
OTHERS = ["constant of a module", "column of a row", "file of the user"]
PLANTED = [*ENVIRONMENT, *USED, *ENDPOINTS, *OTHERS]

SCORER = """
import logging, os

CONSTANT = {constant!r}
TOKEN = os.environ["SERVICE_TOKEN"]
OPENED = open({file!r}).read()
calls = 0


def score(row, response, **info):
    global calls
    calls += 1
    if calls % 5 == 1:
        logging.getLogger("mine").warning("refused for %s", os.environ["LOGGED_PASSWORD"])
    if calls % 5 == 2:
        raise RuntimeError("401 for key " + os.environ["RAISED_API_KEY"])
    if calls % 5 == 3:
        raise ConnectionError("no route to " + os.environ["DATABASE_URL"])
    if calls % 5 == 4:
        try:
            raise ValueError(os.environ["CAUSE_KEY"])
        except ValueError as error:
            raise RuntimeError(TOKEN) from error
    return float(len(response) % 3)


score.is_deterministic = False
"""
ROWS = """
import os

from areal_like.tasks import running_sum


def rows(seed, split, *, limit, options):
    assert os.environ["ROWS_SECRET"]
    for row in running_sum.rows(seed, "train", limit=limit):
        yield {{**row, "note_of_the_author": {column!r}}}
"""
SETTINGS = [
    "warm_start=null", "num_steps=3", "groups_per_step=8", "group_size=2", "sampling.max_new_tokens=8",
    "eval.every_steps=0", "data.eval=null", "trainer.checkpoint.every_steps=1", "data.train.split=null",
    "data.train.generator=canary_rows:rows", "data.train.limit=40", "reward.cache_mb=0",
    "reward.num_workers=1", "reward.num_spares=0", "reward.retries=0", "reward.on_failure=0.0",
]  # fmt: skip


class Refusing(BaseHTTPRequestHandler):
    """Refuses every fourth request with what it was sent, and scores the others."""

    count = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).count += 1
        is_refused = type(self).count % 4 == 0
        body = b'{"value": 1.0}' if not is_refused else f"bad key {self.headers['Authorization']}".encode()
        self.send_response(401 if is_refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def encodings(value: str) -> dict[str, bytes]:
    raw = value.encode()
    found = {"itself": raw, "hex": raw.hex().encode(), "in a URL": urllib.parse.quote(value).encode()}
    for shift in range(3):  # whatever precedes it: the part that does not depend on its neighbours
        found[f"base64 at {shift}"] = base64.b64encode(bytes(shift) + raw)[4:-4]
    return found


def leaks(values: dict[str, str], content: bytes) -> list[str]:
    return [f"{name} ({how})" for name, value in values.items() for how, form in encodings(value).items()
            if form in content]  # fmt: skip


def dashboard_pages(runs_dir: Path, name: str) -> bytes:
    import aiohttp
    from aiohttp import web

    async def whole() -> bytes:
        runner = Dashboard(runs_dir, Access(host="127.0.0.1", token="t" * 20, reads_need_token=False)).runner()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found = b""
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
                for path in ("/", f"/run/{name}", f"/run/{name}/groups", f"/run/{name}/groups/0"):
                    async with client.get(path) as answer:
                        assert answer.status == 200, path
                        found += await answer.read()
                async with client.get(f"/run/{name}/events") as events:
                    for _ in range(2):
                        found += await events.content.readline()
        finally:
            await runner.cleanup()
        return found

    return asyncio.run(whole())


@pytest.mark.thorough
def test_none_of_twenty_planted_secrets_is_in_a_file_of_the_run(
    areal, quickstart, tmp_path, monkeypatch, address, capsys
):
    values = {name: f"Cn4ry{secrets.token_hex(12)}Z" for name in PLANTED}
    assert len(values) == 20
    for name in (*ENVIRONMENT, *USED, "SCORES_KEY", "ECHOED_KEY"):
        monkeypatch.setenv(name, values[name])
    monkeypatch.setenv("DATABASE_URL", f"postgres://me:{values['DATABASE_URL']}@db.invalid/x")
    (tmp_path / "key").write_text(values["key file"])
    (tmp_path / "mine").write_text(values["file of the user"])
    scorer = SCORER.format(constant=values["constant of a module"], file=str(tmp_path / "mine"))
    (tmp_path / "canary_scorer.py").write_text(scorer)
    (tmp_path / "canary_rows.py").write_text(ROWS.format(column=values["column of a row"]))
    keys = ({"key_env": "ECHOED_KEY"}, {"key_env": "SCORES_KEY"}, {"key_file": str(tmp_path / "key")})
    scorers = [
        {"kind": "http", "options": {"url": address, "columns": ["prompt"], **key}}
        for key in keys
    ]  # fmt: skip
    scorers.append({"kind": "canary_scorer:score"})
    run = areal("train", quickstart, *SETTINGS, f"reward.scorers={json.dumps(scorers)}")
    assert run.wait() == 0, run.output
    found = {
        str(path.relative_to(run.folder)): leaks(values, path.read_bytes())
        for path in sorted(run.folder.rglob("*")) if path.is_file()
    }  # fmt: skip
    assert {"ledger.sqlite", "report.html", "config.yaml", "metrics.jsonl", "state.json"} <= found.keys()
    assert any(name.startswith("logs/") for name in found)
    assert any(name.startswith("segments/") for name in found)
    assert any(name.startswith("checkpoints/") for name in found)
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        facts = b" ".join(blob for (blob,) in db.execute("SELECT facts FROM samples"))
    reached = {name: f"[{name}]".encode() in facts for name in ("RAISED_API_KEY", "DATABASE_URL", "SERVICE_TOKEN")}
    assert all(reached.values()), f"the test must make the user's code fail with them: {reached}"
    assert b"bad key Bearer [the key]" in facts, "the server must have repeated its key"
    logs = b"".join(path.read_bytes() for path in (run.folder / "logs").iterdir() if path.is_file())
    assert b"[LOGGED_PASSWORD]" in logs
    found["the command's output"] = leaks(values, run.output.encode())
    for words in (["status", "--why"], ["logs", "-n", "all"], ["samples", "--format", "jsonl", "--limit", "all"]):
        main([words[0], str(run.folder), *words[1:]])
        found[f"areal-like {words[0]}"] = leaks(values, capsys.readouterr().out.encode())
    found["the dashboard"] = leaks(values, dashboard_pages(run.folder.parent, run.folder.name))
    assert {name: what for name, what in found.items() if what} == {}
