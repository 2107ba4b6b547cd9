"""Asking a reward service for its statistics: again until it answers, never longer than the deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import DeadlineExceeded
from areal_like.transport import service_stats
from areal_like.transport.service_stats import ask_stats
from areal_like.wire.messages import StatsReply, StatsRequest, Welcome

REPLY = StatsReply(
    request_id="1", name="s", pid=1, state="ready", uptime_s=1.0, label="", scorers=(), num_workers=1, counters={}
)
WELCOME = Welcome(run_id="r", incarnation="i")


class FakePeer:
    """Each wait for an answer lasts as long as it may; `answers` are what it brings."""

    made: list[FakePeer]
    answers: list[Any]
    now_s = 50.0

    def __init__(self, **facts: Any) -> None:
        self.facts, self.waits, self.sent = facts, [], []
        self.is_closed = False
        FakePeer.made.append(self)

    @staticmethod
    def monotonic() -> float:
        return FakePeer.now_s

    async def connect(self, timeout_s: float) -> None:
        self.connected_s = timeout_s

    async def send(self, message: StatsRequest, timeout_s: float) -> None:
        self.sent.append((message.request_id, timeout_s))

    async def receive(self, timeout_s: float) -> Any:
        self.waits.append(timeout_s)
        FakePeer.now_s += timeout_s
        return FakePeer.answers.pop(0) if FakePeer.answers else None

    async def close(self, reason: str) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePeer.made, FakePeer.answers, FakePeer.now_s = [], [], 50.0
    monkeypatch.setattr(service_stats, "Peer", FakePeer)
    monkeypatch.setattr(service_stats, "time", FakePeer)


def asked(tmp_path: Path, timeout_s: float) -> Any:
    return asyncio.run(ask_stats("tcp://127.0.0.1:1", curve_dir=tmp_path, timeout_s=timeout_s))


def test_the_question_is_repeated_until_the_statistics_come(tmp_path: Path) -> None:
    FakePeer.answers = [None, WELCOME, REPLY]
    assert asked(tmp_path, 5.0) is REPLY
    (peer,) = FakePeer.made
    identity = peer.facts["hello"].incarnation
    assert peer.sent == [(identity, 5.0), (identity, 4.0), (identity, 3.0)]
    assert peer.waits == [1.0, 1.0, 1.0]
    assert peer.is_closed


def test_nobody_who_answers_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"reward service at tcp://127\.0\.0\.1:1"):
        asked(tmp_path, 2.5)
    (peer,) = FakePeer.made
    assert peer.waits == [1.0, 1.0, 0.5]
    assert peer.is_closed


def test_the_connection_waits_and_keeps_silent_no_longer_than_the_deadline(tmp_path: Path) -> None:
    FakePeer.answers = [REPLY]
    asked(tmp_path, 3.0)
    (peer,) = FakePeer.made
    assert (peer.connected_s, peer.facts["heartbeat_s"], peer.facts["silence_s"]) == (3.0, 3.0, 3.0)
    assert peer.facts["status"]().state == "asks"
