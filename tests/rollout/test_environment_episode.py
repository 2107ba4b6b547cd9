"""One sample's episode: what it counts, records and gives as its verdict, and how many services its calls fill."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.clock import VirtualClock
from areal_like.environment import Step
from areal_like.errors import DeadlineExceeded
from areal_like.tool_call import ToolCall
from areal_like.wire.messages import EnvironmentReply
from rollout.environment_client import EnvironmentClient, EnvironmentEpisode
from tests.rollout.test_environment_client import TASK, Link, play


class Scripted(Link):
    """A service that answers with these steps, or replies."""

    def __init__(self, client: EnvironmentClient, *steps: Step | dict[str, Any]) -> None:
        super().__init__(client)
        self.steps = list(steps)

    async def send(self, message: Any) -> None:
        self.asked.append(message)
        step = self.steps.pop(0)
        facts: Any = step if isinstance(step, dict) else {"status": "answered", "step": step}
        self.client.resolve(EnvironmentReply(episode_id=message.episode_id, turn=message.turn, **facts))


def test_rewards_of_actions_are_summed_and_components_are_those_of_the_last_step() -> None:
    async def scene(client: EnvironmentClient) -> None:
        Scripted(
            client, Step(components={"a": 1.0}), Step(reward=0.25, components={"b": 2.0}),
            Step(reward=0.5, components={"c": 3.0, "turns": 9.0}, is_done=True),
        )  # fmt: skip
        async with client.episode(TASK) as episode:
            await episode.reset()
            assert (episode.num_turns, episode.rewards, episode.components) == (0, [], {"a": 1.0})
            await episode.step("x")
            await episode.step("y")
            assert (episode.num_turns, episode.rewards, episode.is_done) == (2, [0.25, 0.5], True)
            verdict = episode.verdict({"turns": 2.0, "ended": 1.0})
        assert (verdict.kind, verdict.value, verdict.scorer) == ("scored", 0.75, "environment")
        assert verdict.components == {"turns": 9.0, "ended": 1.0, "c": 3.0}, "the environment's stand before"
        with pytest.raises(AssertionError, match="has ended the episode"):
            await episode.step("z")

    play(scene)


@pytest.mark.parametrize("status", ["timed_out", "crashed", "invalid"])
def test_failure_keeps_its_kind_and_reason_and_the_turns_that_were_answered(status: str) -> None:
    async def scene(client: EnvironmentClient) -> None:
        Scripted(client, Step(), Step(reward=1.0), {"status": status, "reason": "why", "attempts": 3})
        async with client.episode(TASK) as episode:
            await episode.reset()
            await episode.step("a")
            assert await episode.step("b") is None
            verdict = episode.verdict()
        assert (verdict.kind, verdict.reason, verdict.attempts) == (status, "why", 3)
        assert (verdict.scorer, verdict.failed_in, verdict.value) == ("environment", "environment", None)
        assert verdict.components == {"turns": 1.0}
        assert client.counters == {f"environment_{status}": 1.0}
        with pytest.raises(AssertionError, match="has failed"):
            await episode.step("c")

    play(scene)


@pytest.mark.parametrize("reply", [{"status": "answered"}, {"status": "lost", "step": Step()}])
def test_answer_that_is_none_is_a_crash(reply: dict[str, Any]) -> None:
    async def scene(client: EnvironmentClient) -> None:
        Scripted(client, reply)
        episode = client.episode(TASK)
        assert await episode.reset() is None
        assert episode.verdict().kind == "crashed"

    play(scene)


def test_episode_goes_on_from_its_record() -> None:
    async def scene(client: EnvironmentClient) -> None:
        Scripted(client, Step(), Step(reward=0.5, components={"b": 2.0}))
        before = client.episode(TASK)
        await before.reset()
        await before.step("x")
        before.turn_ends.append(4)
        record = before.record
        assert record == {
            "actions": ["x"], "digests": [Step().digest, Step(reward=0.5).digest], "rewards": [0.5],
            "components": {"b": 2.0}, "is_done": False, "turn_ends": [4],
        }  # fmt: skip
        again = client.episode(TASK, record)
        assert again.record == record
        assert again.id != before.id
        history = again.history(2)
        assert (history.actions, history.digests) == (("x",), tuple(record["digests"]))
        assert again.history(0).actions == again.history(1).actions == ()
        assert (again.history(0).digests, again.history(1).digests) == ((), (Step().digest,))
        with pytest.raises(AssertionError, match="comes first"):
            await again.reset()

    play(scene)


def test_calls_of_tools_travel_as_texts_that_can_be_sent_and_no_more_than_64() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Scripted(client, Step(), Step())
        episode = client.episode(TASK)
        await episode.reset()
        await episode.step((ToolCall("\ud800", "\ud801", "\ud802"), *[ToolCall("f", "{}")] * 70))
        sent = link.asked[-1].action
        assert isinstance(sent, tuple)
        assert (sent[0], len(sent)) == (ToolCall("?", "?", "?"), 64)

    play(scene)


@pytest.mark.parametrize(("num_chars", "is_sent"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_action_has_at_most_a_million_characters(num_chars: int, is_sent: bool) -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Scripted(client, Step(), Step())
        episode = client.episode(TASK)
        await episode.reset()
        await episode.step("x" * num_chars)
        assert len(link.asked) == 1 + is_sent
        if not is_sent:
            what = "the action in turn 1 has 1048577 characters, but at most 1048576 are allowed"
            assert episode.verdict().reason == what

    play(scene)


@pytest.mark.parametrize(("num_before", "is_sent"), [(4095, True), (4096, False)])
def test_episode_has_at_most_4096_actions(num_before: int, is_sent: bool) -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Scripted(client, Step())
        record = {
            "actions": [""] * num_before, "digests": [""] * (num_before + 1), "rewards": [0.0] * num_before,
            "components": {}, "is_done": False, "turn_ends": [],
        }  # fmt: skip
        episode = client.episode(TASK, record)
        assert (await episode.step("x") is not None) == is_sent
        assert len(link.asked) == is_sent
        if not is_sent:
            assert episode.verdict().reason == "the episode has more than 4096 turns, which is the maximum"

    play(scene)


def test_full_services_are_counted_and_asked_again() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client, "full", "draining", "unknown", None)
        async with client.episode(TASK) as episode:
            assert await episode.reset() is not None
        assert [one.history is not None for one in link.asked] == [True, True, True, True, False], (
            "one that sent the episode away knows nothing of it"
        )
        assert client.counters == {"environment_full": 1.0, "environment_draining": 1.0, "environment_resent": 2.0}

    play(scene, resend_s=0.01)


def test_service_that_cannot_be_reached_is_asked_again_after_a_pause() -> None:
    class Far(Link):
        num_sent = 0

        async def send(self, message: Any) -> None:
            self.num_sent += 1
            if self.num_sent < 3:
                raise DeadlineExceeded("room", "the service", 1.0)
            await super().send(message)

    async def scene(client: EnvironmentClient) -> None:
        link = Far(client)
        assert await client.episode(TASK).reset() is not None
        assert link.num_sent == 3
        assert client.counters == {"environment_resent": 2.0}

    play(scene)


def test_episode_stays_where_it_is_while_that_service_takes_questions() -> None:
    async def scene(client: EnvironmentClient) -> None:
        first, second = Link(client), Link(client)
        episode = client.episode(TASK)
        await episode.reset()
        for _ in range(3):
            await episode.step("a")
        assert (len(first.asked), len(second.asked)) == (4, 0)
        assert client.counters == {}
        first.accepts_requests = False
        await episode.step("a")
        assert (len(first.asked), len(second.asked)) == (4, 1)
        assert client.counters == {"environment_moved": 1.0}
        other = client.episode(TASK)
        first.accepts_requests = True
        await other.reset()
        assert len(first.asked) == 5, "it has none any more, and the second one has one"

    play(scene)


def test_answer_that_nobody_waits_for_is_counted() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client)
        episode = client.episode(TASK)
        await episode.reset()
        for turn in (0, 1):
            client.resolve(EnvironmentReply(episode_id=episode.id, turn=turn, status="answered", step=Step()))
        assert client.counters == {"environment_stray": 2.0}
        assert len(link.asked) == 1

    play(scene)


def test_second_answer_to_a_call_is_counted_and_dropped() -> None:
    class Twice(Link):
        async def send(self, message: Any) -> None:
            await super().send(message)
            reply = EnvironmentReply(
                episode_id=message.episode_id, turn=message.turn, status="crashed", reason="too late"
            )
            self.client.resolve(reply)

    async def scene(client: EnvironmentClient) -> None:
        Twice(client)
        assert await client.episode(TASK).reset() is not None
        assert client.counters == {"environment_stray": 1.0}

    play(scene)


def test_restart_of_another_service_changes_nothing_for_a_call() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client, None)
        other = SimpleNamespace(accepts_requests=False)
        calling = asyncio.create_task(client.episode(TASK).reset())
        await asyncio.sleep(0)
        client.wake(other)  # type: ignore[arg-type]
        for _ in range(5):
            await asyncio.sleep(0)
        assert (len(link.asked), calling.done()) == (1, False)
        client.wake(link)
        client.wake(link)
        assert await calling is not None

    play(scene, resend_s=1000.0)


def test_call_that_was_given_up_says_how_long_it_waited() -> None:
    clock = VirtualClock()

    class Silent(Link):
        async def send(self, message: Any) -> None:
            clock.advance(7.0)

    async def scene(client: EnvironmentClient) -> None:
        Silent(client)
        episode = client.episode(TASK)
        await episode.reset()
        assert episode.verdict().reason == "the environment did not reply within 7 s (rollout.score_timeout_s)"

    play(scene, total_deadline_s=0.01, clock=clock)


def test_episode_that_never_reached_a_service_is_not_closed_anywhere() -> None:
    async def scene(client: EnvironmentClient) -> None:
        link = Link(client)
        async with client.episode(TASK):
            pass
        await client.flush(link)
        assert link.closed == []

    play(scene)


def seed_of(run_seed: int, purpose: str, group_id: int, row: Any) -> int:
    client = EnvironmentClient(name="r0", seed=run_seed, total_deadline_s=1.0)
    task: Any = SimpleNamespace(row=row, purpose=purpose, group_id=group_id)
    episode: EnvironmentEpisode = client.episode(task)
    return episode.history(0).seed


def test_seed_is_that_of_the_run_and_the_group_or_of_the_evaluated_row() -> None:
    assert seed_of(1, "train", 3, {"a": 1}) == seed_of(1, "train", 3, {"a": 2})
    assert seed_of(1, "eval", 3, {"a": 1, "b": 2}) == seed_of(1, "eval", 4, {"b": 2, "a": 1})
    different = {
        seed_of(1, "train", 3, {}), seed_of(2, "train", 3, {}), seed_of(1, "train", 4, {}),
        seed_of(1, "eval", 3, {"a": 1}), seed_of(1, "eval", 3, {"a": 2}), seed_of(1, "eval", 3, {"a": 3}),
    }  # fmt: skip
    assert len(different) == 6
    assert all(0 <= seed < 1 << 62 for seed in different), "NumPy and others take it as an int64"
    assert max(different) >= 1 << 58
