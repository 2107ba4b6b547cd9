"""Scorer `http` against a real server on loopback that misbehaves in every way."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from odd_server import Asked, OddServer, flood, hang, hang_up, reply, trickle

from areal_like.errors import UserError
from services.reward.composition import WeightedSum
from services.reward.config import ScorerSettings
from services.reward.job import Job, Outcome

SERVERS: list[OddServer] = []


@pytest.fixture(autouse=True)
def servers_end() -> Iterator[None]:
    yield
    while SERVERS:
        SERVERS.pop().close()


def served(behave: Callable[[int, BaseHTTPRequestHandler, Asked], None]) -> OddServer:
    SERVERS.append(OddServer(behave))
    return SERVERS[-1]


def scorer_of(url: str, **options: Any) -> WeightedSum:
    options = {"url": url, "backoff_s": 0.01, **options}
    return WeightedSum.from_settings((ScorerSettings(kind="http", options=options),))


def score(scorer: WeightedSum, **row: Any) -> Outcome:
    job = Job(job_id=1, scorer="", row=row, response="an answer", finish_reason="stop", num_tokens=3)
    return scorer.score(job, lambda name: None)


def test_row_and_answer_go_out_and_value_and_parts_come_back() -> None:
    server = served(
        lambda n, h, asked: reply(h, {"value": 0.5, "components": {"style": 0.25}, "correct": 1, "reason": "well said"})
    )
    outcome = score(scorer_of(server.url), question="why?", nested={"a": [1, None]})
    assert server.asked == [
        {"row": {"question": "why?", "nested": {"a": [1, None]}}, "response": "an answer", "finish_reason": "stop",
         "num_tokens": 3}
    ]  # fmt: skip
    assert outcome.value == 0.5
    assert outcome.components == {"http": 0.5, "http.style": 0.25, "correct": 1.0}
    assert outcome.reason == "http: well said"


def test_only_the_columns_asked_for_are_sent_and_a_missing_one_is_invalid() -> None:
    server = served(lambda n, h, asked: reply(h, {"value": 1}))
    scorer = scorer_of(server.url, columns=["question"])
    score(scorer, question="q", secret="s")
    assert server.asked[0]["row"] == {"question": "q"}
    outcome = score(scorer, secret="s")
    assert (outcome.kind, outcome.reason) == ("invalid", "http: the row has no `question`")
    assert len(server.asked) == 1


def test_connections_are_kept_from_answer_to_answer() -> None:
    server = served(lambda n, h, asked: reply(h, {"value": n}))
    scorer = scorer_of(server.url)
    assert [score(scorer).value for _ in range(5)] == [1, 2, 3, 4, 5]
    assert len(server.connections) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503])
def test_a_server_that_recovers_is_asked_again(status: int) -> None:
    server = served(lambda n, h, asked: reply(h, {"value": 7} if n == 3 else b"busy", 200 if n == 3 else status))
    outcome = score(scorer_of(server.url))
    assert (outcome.value, len(server.asked)) == (7, 3)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_a_refusal_is_invalid_and_not_asked_again(status: int) -> None:
    server = served(lambda n, h, asked: reply(h, b"no such\nthing \x00", status))
    outcome = score(scorer_of(server.url))
    assert outcome.kind == "invalid"
    assert f"status {status} (no such thing ?)" in outcome.reason
    assert len(server.asked) == 1


def test_a_server_that_stays_broken_is_crashed_after_all_retries() -> None:
    server = served(lambda n, h, asked: reply(h, b"oops", 500))
    outcome = score(scorer_of(server.url, retries=2))
    assert (outcome.kind, len(server.asked)) == ("crashed", 3)
    assert "failed 3 times" in outcome.reason
    assert "status 500 (oops)" in outcome.reason


def test_a_broken_connection_is_tried_again() -> None:
    server = served(lambda n, h, asked: hang_up(h) if n == 1 else reply(h, {"value": 2}))
    assert score(scorer_of(server.url)).value == 2


def test_nobody_listening_is_crashed_and_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        outcome = score(scorer_of(url, retries=1))
    assert outcome.kind == "crashed"
    assert url in outcome.reason


@pytest.mark.parametrize("behaviour", [hang, trickle])
def test_all_attempts_together_end_at_the_deadline(behaviour: Callable[[BaseHTTPRequestHandler], None]) -> None:
    server = served(lambda n, h, asked: reply(h, b"", 503) if n == 1 else behaviour(h))
    started_s = time.monotonic()
    outcome = score(scorer_of(server.url, total_timeout_s=2.0, retries=5))
    assert outcome.kind == "timed_out"
    assert "within 2 s; the previous failure: status 503" in outcome.reason
    assert time.monotonic() - started_s < 10  # far below what the server would take


def test_after_a_timeout_the_next_answer_is_scored() -> None:
    server = served(lambda n, h, asked: hang(h) if n == 1 else reply(h, {"value": 1}))
    scorer = scorer_of(server.url, total_timeout_s=3.0)  # room for a busy machine to answer the second
    assert score(scorer).kind == "timed_out"
    assert score(scorer).value == 1


def test_a_pause_longer_than_the_time_left_is_not_waited_for() -> None:
    server = served(lambda n, h, asked: reply(h, b"", 429, Retry_After="3600"))
    outcome = score(scorer_of(server.url))
    assert (outcome.kind, len(server.asked)) == ("crashed", 1)
    assert "no time is left" in outcome.reason


def test_a_body_without_end_is_refused_at_its_bound() -> None:
    server = served(lambda n, h, asked: flood(h))
    outcome = score(scorer_of(server.url, max_reply_kb=64))
    assert (outcome.kind, len(server.asked)) == ("invalid", 1)
    assert "larger than max_reply_kb (64)" in outcome.reason


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>", b"[1]", b"1.0", b'{"score": 1}', b'{"value": "1"}', b'{"value": null}', b'{"value": NaN}',
        b'{"value": Infinity}', b'{"value": 1e999}', b'{"value": true}', b'{"value": 1, "components": {"a": "b"}}',
        b'{"value": 1, "components": [1]}', b'\xff\xfe', b'{"value": 1} trailing', b'{"value": ' + b"[" * 5000,
        b'{"value": 1, "components": {"value": 2}}',
    ],
)  # fmt: skip
def test_a_reply_that_is_no_score_is_invalid(body: bytes) -> None:
    server = served(lambda n, h, asked: reply(h, body))
    outcome = score(scorer_of(server.url))
    assert (outcome.kind, outcome.value, len(server.asked)) == ("invalid", None, 1)


def test_the_key_is_sent_and_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("sk-verysecret\n")
    monkeypatch.setenv("MY_KEY", "sk-verysecret")
    server = served(lambda n, h, asked: reply(h, b"no", 401))
    for place in ({"key_file": str(tmp_path / "key")}, {"key_env": "MY_KEY"}):
        scorer = scorer_of(server.url + "/a?token=sk-verysecret", **place)
        outcome = score(scorer)
        assert server.headers[-1]["Authorization"] == "Bearer sk-verysecret"
        assert "verysecret" not in outcome.reason + scorer.label
    assert "verysecret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftp://x"}, ["http://host:port"]),
        ({"url": "http://me:pw@host/"}, ["key_env or key_file"]),
        ({"url": "http://host:99999/"}, ["not a valid URL"]),
        ({}, ["url", "required"]),
        ({"url": "http://h", "headers": {"Authorization": "x"}}, ["key_env"]),
        ({"url": "http://h", "key_env": "A", "key_file": "B"}, ["set only one"]),
        ({"url": "http://h", "key_env": "SURELY_NOT_SET"}, ["SURELY_NOT_SET", "no key"]),
        ({"url": "http://h", "key_file": "/nowhere/key"}, ["/nowhere/key", "No such file"]),
        ({"url": "http://h", "total_timeout_s": 0}, ["greater than 0"]),
    ],
)
def test_what_cannot_work_is_reported_at_the_start(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        WeightedSum.from_settings((ScorerSettings(kind="http", options=options),))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_other_questions_make_another_version() -> None:
    labels = {
        scorer_of("http://h/a").label,
        scorer_of("http://h/b").label,
        scorer_of("http://h/a", columns=["x"]).label,
    }
    assert len(labels) == 3
    assert scorer_of("http://h/a").label == scorer_of("http://h/a", retries=9).label
