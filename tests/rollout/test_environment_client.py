"""Calls of environments when services restart, fall silent, are full or never answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.environment import MAX_ACTION_CHARS, Step
from areal_like.errors import DeadlineExceeded, WireError
from areal_like.wire.messages import EnvironmentClosed, EnvironmentReply, EnvironmentRequest
from rollout.environment_client import EnvironmentClient

TASK: Any = SimpleNamespace(row={"a": 1}, purpose="train", group_id=1)


class Link:
    """A service that answers by `plan`: a status for each request, None for silence; then `answered`."""

    def __init__(self, client: EnvironmentClient, *plan: str | None) -> None:
        self.client, self.plan = client, list(plan)
        self.asked: list[EnvironmentRequest] = []
        self.closed: list[str] = []
        self.accepts_requests, self.is_broken = True, False
        client.links.append(self)

    async def send(self, message: Any) -> None:
        if self.is_broken:
            raise DeadlineExceeded("room", "the service", 1.0)
        if isinstance(message, EnvironmentClosed):
            self.closed += message.episode_ids
            return
        self.asked.append(message)
        status: Any = self.plan.pop(0) if self.plan else "answered"
        if status is not None:
            step = Step(observation=f"{message.turn}{message.action}", reward=0.5) if status == "answered" else None
            self.client.resolve(
                EnvironmentReply(episode_id=message.episode_id, turn=message.turn, status=status, step=step, reason="r")
            )


def play(scene: Callable[[EnvironmentClient], Awaitable[None]], **more: Any) -> EnvironmentClient:
    async def whole() -> EnvironmentClient:
        client = EnvironmentClient(name="r0", seed=1, **{"total_deadline_s": 30.0, "tick_s": 0.001, **more})
        async with asyncio.timeout(300.0):
            await scene(client)
        return client

    return asyncio.run(whole())


def test_the_history_travels_with_the_first_call_and_where_it_is_asked_for() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client, "answered", "answered", "unknown")
        async with client.episode(TASK) as episode:
            await episode.reset()
            await episode.step("a")
            await episode.step("b")
        first, second, third, again = link.asked
        assert first.history is not None
        assert (first.history.row, first.history.actions) == ({"a": 1}, ())
        assert second.history is third.history is None
        assert again.history is not None
        assert (again.turn, again.history.actions, len(again.history.digests)) == (2, ("a",), 2)
        assert episode.verdict().value == 1.0

    play(scene)


def test_a_call_that_nobody_answers_is_asked_again() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client, None)
        assert await client.episode(TASK).reset() == Step(observation="0", reward=0.5)
        assert len(link.asked) == 2

    play(scene, resend_s=0.01)


def test_a_service_that_restarts_is_asked_again_at_once() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client, None, "unknown")
        calling = asyncio.create_task(client.episode(TASK).reset())
        await asyncio.sleep(0)
        client.wake(link)
        assert await calling is not None
        assert [one.history is not None for one in link.asked] == [True, False, True]

    play(scene, resend_s=1000.0)


@pytest.mark.parametrize("how", ["silent", "full", "draining"])
def test_an_episode_moves_to_another_service_with_its_history(how: str) -> None:
    async def scene(client: EnvironmentClient) -> None:
        first = Link(client, "answered", None if how == "silent" else how)
        episode = client.episode(TASK)
        await episode.reset()
        second = Link(client)
        calling = asyncio.create_task(episode.step("a"))
        await asyncio.sleep(0)
        first.accepts_requests = False
        client.wake(first)
        assert await calling is not None
        assert second.asked[0].history is not None
        assert second.asked[0].turn == 1
        await client.flush(first)
        assert first.closed == [episode.id], "it forgets the episode if it comes back"

    play(scene, resend_s=1000.0)


def test_episodes_are_spread_over_services_and_forgotten_at_their_end() -> None:
    async def scene(client: EnvironmentClient) -> None:
        links = [Link(client), Link(client)]
        episodes = [client.episode(TASK) for _ in range(4)]
        for episode in episodes:
            await episode.reset()
        assert [len(link.asked) for link in links] == [2, 2]
        for episode in episodes:
            await episode.__aexit__()
        links[0].is_broken = True
        for link in links:
            await client.flush(link)
        assert (len(links[0].closed), len(links[1].closed)) == (0, 2)
        links[0].is_broken = False
        await client.flush(links[0])
        assert len(links[0].closed) == 2, "what could not be sent is sent later"

    play(scene)


def test_no_answer_within_the_deadline_is_a_verdict() -> None:
    async def scene(client: EnvironmentClient) -> None:
        episode = client.episode(TASK)
        assert await episode.reset() is None
        assert episode.failure is not None
        assert episode.failure.kind == "crashed"
        assert "the environment did not reply within" in episode.failure.reason

    play(scene, total_deadline_s=0.01)


def test_an_action_that_is_too_long_is_not_sent() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client)
        episode = client.episode(TASK)
        await episode.reset()
        assert await episode.step("x" * (MAX_ACTION_CHARS + 1)) is None
        assert episode.failure is not None
        assert episode.failure.kind == "invalid"
        assert len(link.asked) == 1

    client = play(scene)
    assert client.counters == {"environment_invalid": 1.0}


def test_calls_are_watched_and_a_lone_surrogate_travels() -> None:
    async def scene(client: EnvironmentClient) -> None:
        seen: list[bool] = []
        link = Link(client)
        episode = client.episode(TASK, watch=seen.append)
        await episode.reset()
        await episode.step("\ud800")
        assert seen == [True, False, True, False]
        assert link.asked[-1].action == "?"
        assert episode.record["actions"] == ["?"]

    play(scene)


def test_a_sum_that_overflows_is_invalid() -> None:
    async def scene(client: EnvironmentClient) -> None:
        episode = client.episode(TASK)
        episode.rewards = [1e308, 1e308]
        assert episode.verdict().kind == "invalid"

    play(scene)


def test_an_episode_that_comes_back_before_its_service_was_notified_is_not_closed_there() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client, "full")
        async with client.episode(TASK) as episode:
            await episode.reset()
            await client.flush(link)
            assert link.closed == []
        await client.flush(link)
        assert link.closed == [link.asked[-1].episode_id]

    play(scene)


def test_a_request_that_can_never_be_sent_fails_its_sample_at_once_with_the_reason() -> None:
    class Narrow(Link):
        async def send(self, message: Any) -> None:
            raise WireError("EnvironmentRequest cannot be encoded: too long")

    async def scene(client: EnvironmentClient) -> None:
        Narrow(client)
        async with client.episode(TASK) as episode:
            await episode.reset()
            assert episode.failure is not None
            assert episode.verdict().kind == "invalid"
            assert "cannot be encoded" in episode.verdict().reason

    play(scene, total_deadline_s=1e6)


def test_what_a_service_that_is_gone_does_not_know_of_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.environment_client.MAX_LEFT", 3)

    async def scene(client: EnvironmentClient) -> None:
        link = Link(client)
        for _ in range(5):
            async with client.episode(TASK) as episode:
                await episode.reset()
        await client.flush(link)
        assert link.closed == [one.episode_id for one in link.asked[-3:]]

    play(scene)
