"""Claims about asking a server again: how long it pauses, what it heeds, when it gives up; with the server played."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.external import http_client as module
from areal_like.external.errors import RequestFailed, RequestRefused
from areal_like.external.http_client import MAX_PAUSE_S, HttpClient, shown
from areal_like.external.key import read_key
from areal_like.external.settings import EndpointOptions

URL = "http://127.0.0.1:1/score?token=secret"
Answer = tuple[int, bytes, float]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made, none of them waited for."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    monkeypatch.setattr(module.random, "uniform", lambda low, high: high)
    return made


def asked(answers: list[Answer | Exception], give_up_s: float = 1e12, **options: Any) -> tuple[bytes, list[str]]:
    endpoint = HttpClient(URL, EndpointOptions(**{"retries": 9, **options}), {}, "here")
    failures: list[str] = []

    async def attempt(content: bytes) -> Answer:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    endpoint._attempt = attempt  # type: ignore[method-assign]
    return asyncio.run(endpoint._attempts(b"{}", give_up_s, failures)), failures


BUSY: Answer = (503, b"busy", 0.0)


def test_each_pause_is_twice_as_long_up_to_a_bound(pauses: list[float]) -> None:
    reply, failures = asked([*[BUSY] * 7, (200, b"yes", 0.0)], backoff_s=0.2)
    assert reply == b"yes"
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, MAX_PAUSE_S, MAX_PAUSE_S])
    assert failures == ["status 503 (busy)"] * 7


def test_chance_shortens_a_pause_to_a_half_at_most(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return low

    monkeypatch.setattr(module.random, "uniform", uniform)
    asked([BUSY, (204, b"", 0.0)], backoff_s=0.2)
    assert (bounds, pauses) == ([(0.5, 1.0)], [0.1])


def test_server_that_names_a_longer_pause_gets_it(pauses: list[float]) -> None:
    asked([(429, b"", 3.0), (429, b"", 0.1), (200, b"", 0.0)], backoff_s=0.2)
    assert pauses == [3.0, 0.4]


def test_it_gives_up_after_so_many_retries(pauses: list[float]) -> None:
    with pytest.raises(RequestFailed, match=r"failed 3 times; last failure: status 503 \(busy\)") as raised:
        asked([BUSY] * 5, retries=2)
    assert len(pauses) == 2
    assert "secret" not in str(raised.value)


def test_it_gives_up_where_a_pause_would_end_after_the_time(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    with pytest.raises(RequestFailed, match="failed 2 times, and no time is left to retry"):
        asked([BUSY] * 5, backoff_s=0.2, give_up_s=100.4)
    assert pauses == [0.2]


@pytest.mark.parametrize(("status", "is_final"), [(199, True), (300, True), (400, True), (499, True), (500, False)])
def test_only_answers_that_may_change_are_asked_for_again(status: int, is_final: bool, pauses: list[float]) -> None:
    answers: list[Answer | Exception] = [(status, b"why\x07", 0.0), (299, b"yes", 0.0)]
    if is_final:
        with pytest.raises(RequestRefused, match=rf"rejected the request: status {status} \(why\?\)"):
            asked(answers)
    else:
        assert asked(answers)[0] == b"yes"


def test_broken_connection_is_tried_again_and_named(pauses: list[float]) -> None:
    reply, failures = asked([OSError("broken pipe"), (200, b"yes", 0.0)])
    assert (reply, failures) == (b"yes", ["OSError: broken pipe"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("0", 0.0), ("", 0.0), ("99999", 99999.0), ("100000", 0.0), ("-1", 0.0), ("1.5", 0.0), ("٣", 0.0),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)  # fmt: skip
def test_pause_is_taken_from_whole_seconds_alone(text: str, seconds: float) -> None:
    assert module._seconds(text) == seconds


def test_address_is_shown_without_what_may_be_secret() -> None:
    assert shown("https://h:1/a/b?key=x#y") == "https://h:1/a/b"


@pytest.mark.parametrize("key", ["a b", "clé", "a\tb", "a\nb"])
def test_key_with_white_space_or_other_letters_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", key)
    with pytest.raises(UserError, match="the key in environment variable THE_KEY contains white space") as raised:
        read_key(EndpointOptions(key_env="THE_KEY"), "here")
    assert key not in str(raised.value)
    monkeypatch.setenv("THE_KEY", "  sk-x \n")
    assert read_key(EndpointOptions(key_env="THE_KEY"), "here") == "sk-x"
    assert read_key(EndpointOptions(), "here") is None
    monkeypatch.setenv("THE_KEY", "   ")
    with pytest.raises(UserError, match="THE_KEY contains no key"):
        read_key(EndpointOptions(key_env="THE_KEY"), "here")


@pytest.mark.parametrize(
    ("key", "shown_words"),
    [("EMPTY", "status 503 (EMPTY queue)"), ("sk-12345678", "status 503 ([the key] queue)")],
)
def test_a_key_is_removed_from_replies_unless_it_is_as_short_as_a_word(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch, key: str, shown_words: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    _, failures = asked([(503, f"{key} queue".encode(), 0.0), (200, b"", 0.0)], key_env="JUDGE_KEY")
    assert failures == [shown_words]
