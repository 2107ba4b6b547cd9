"""Which receiver a run's weight transfer gets, and which locations it is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.weights import choice
from rollout.weights.port import JoinAs


class Receiver:
    """Records what it is asked."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of, self.asked = made_of, list[Any]()

    async def receive(self, place: str, deadline_s: float) -> Path:
        self.asked.append(("receive", place, deadline_s))
        return Path("received")

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> Any:
        self.asked.append(("meet", place, deadline_s, who))
        return "call"

    def run(self) -> str:
        return "run"

    def forget(self) -> str:
        return "forget"

    def counters(self) -> str:
        return "counters"

    def close(self) -> str:
        return "close"


def made(monkeypatch: pytest.MonkeyPatch, scheme: str) -> Any:
    transfer = SimpleNamespace(receiver="mine:make", scheme=scheme)
    monkeypatch.setattr(choice, "find_transfer", lambda kind: transfer if kind == "mine" else None)
    monkeypatch.setattr(choice, "import_factory", lambda path, where: Receiver if path == "mine:make" else None)
    spec: Any = SimpleNamespace(weight_transfer="mine", merges_adapters=False)
    return choice.receiver_of(spec, "wires")  # type: ignore[arg-type]


def test_a_transfer_with_a_scheme_is_asked_for_its_locations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        receiver, who = made(monkeypatch, "s3://"), JoinAs(1, "cpu")
        inner = receiver._receiver
        assert inner.made_of[1] == "wires"
        assert await receiver.receive("s3://v1", 5.0) == Path("received")
        assert await receiver.receive("/disk/v1.manifest.json", 5.0) == Path("/disk/v1.manifest.json")
        assert await receiver.meet("s3://v1", 6.0, who) == "call"
        assert await receiver.meet("/disk/v1.manifest.json", 6.0, who) is None
        assert inner.asked == [("receive", "s3://v1", 5.0), ("meet", "s3://v1", 6.0, who)]
        assert [receiver.run(), receiver.forget(), receiver.counters(), receiver.close()] == [
            "run", "forget", "counters", "close",
        ]  # fmt: skip

    asyncio.run(body())


def test_a_transfer_without_a_scheme_is_asked_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = made(monkeypatch, "")
    assert isinstance(receiver, Receiver)
    asyncio.run(receiver.receive("/disk/v1", 5.0))
    assert receiver.asked == [("receive", "/disk/v1", 5.0)]
