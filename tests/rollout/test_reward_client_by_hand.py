"""The reward client over connections and a clock that the test plays: whom it asks, when it asks again, what counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.clock import VirtualClock
from areal_like.errors import ChannelError, DeadlineExceeded, WireError
from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from rollout.reward_client import FEED, OTHERS_S, PROBE, RewardClient

SCORED = Verdict(kind="scored", value=1.0)
RESEND_S, MOVE_S, SILENCE_S, TICK_S = 30.0, 3.0, 15.0, 1.0


class Service:
    """One address: what comes from it is put into `inbox`; None: a tick without a message."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.asked: list[m.ScoreRequest] = []
        self.timeouts: list[float] = []
        self.num_absent = 0
        self.failure: Exception | None = None
        self.hub_silence_s = 0.0
        self.goodbye = ""

    async def connect(self, timeout_s: float) -> m.Welcome:
        self.timeouts.append(timeout_s)
        if self.num_absent:
            self.num_absent -= 1
            raise DeadlineExceeded("a reply to the connection request", "the service", timeout_s)
        return m.Welcome(run_id="r", incarnation="i")

    async def receive(self, timeout_s: float) -> Any:
        assert timeout_s == TICK_S
        return await self.inbox.get()

    async def send(self, message: Any, timeout_s: float = 30.0) -> None:
        assert timeout_s == TICK_S
        if self.failure is not None:
            raise self.failure
        self.asked.append(message)

    async def close(self, reason: str = "") -> None:
        self.goodbye = reason

    def take_asked(self) -> list[str]:
        """Answers asked about since the last look."""
        asked, self.asked = self.asked, []
        self.newest = asked
        return [request.response for request in asked]


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


class Bench:
    def __init__(self, num_services: int, **options: Any) -> None:
        self.services = [Service() for _ in range(num_services)]
        self.clock = VirtualClock()
        options = {"total_deadline_s": 1000.0, **options}
        self.client = RewardClient(
            self.services, name="r0", deadline_s=5.0, silence_s=SILENCE_S, move_after_s=MOVE_S, resend_s=RESEND_S,
            tick_s=TICK_S, clock=self.clock, **options,
        )  # fmt: skip
        self.ids: dict[str, str] = {}

    async def ask(self, *answers: str) -> list[asyncio.Task[Verdict]]:
        task: Any = m.SampleTask(
            lease_id=1, group_id=2, sample_index=0, purpose="train", min_version=0, row={"prompt": "p"},
            sampling=m.Sampling(), seed=0, prefix=Segment.empty(),
        )  # fmt: skip
        asked = [asyncio.ensure_future(self.client.score(task, answer, "stop", 3)) for answer in answers]
        await settle()
        return asked

    async def say(self, service: int, *messages: Any) -> None:
        for message in messages:
            self.services[service].inbox.put_nowait(message)
        await settle()

    async def tick(self, elapsed_s: float = TICK_S, *services: int) -> None:
        """Time passes, and services say nothing."""
        self.clock.advance(elapsed_s)
        for number in services or range(len(self.services)):
            await self.say(number, None)

    def id_of(self, answer: str) -> str:
        return next(i for i, question in self.client._pending.items() if question.request.response == answer)

    async def answer(self, service: int, answer: str, **facts: Any) -> None:
        await self.say(service, m.ScoreReply(request_id=self.id_of(answer), verdict=SCORED, **facts))

    async def refuse(self, service: int, answer: str, reason: Any) -> None:
        await self.say(service, m.ScoreRefused(request_id=self.id_of(answer), reason=reason))

    def asked(self) -> list[list[str]]:
        return [service.take_asked() for service in self.services]


def with_client(test: Callable[[Bench], Awaitable[None]], num_services: int = 1, **options: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(300.0):
            bench = Bench(num_services, **options)
            running = asyncio.ensure_future(bench.client.run())
            await settle()
            await test(bench)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(whole())


def test_a_question_carries_what_the_scorer_needs_and_its_verdict_comes_back() -> None:
    async def test(bench: Bench) -> None:
        (first, second) = await bench.ask("a", "b")
        assert bench.asked() == [["a", "b"]]
        request = bench.services[0].newest[0]
        assert (request.finish_reason, request.num_tokens, request.deadline_s, request.row) == (
            "stop", 3, 5.0, {"prompt": "p"},
        )  # fmt: skip
        assert bench.client.num_outstanding == 2
        await bench.answer(0, "b")
        assert second.done()
        assert not first.done()
        assert await second == SCORED
        assert bench.client.num_outstanding == 1
        assert bench.client.counters == {"verdict_scored": 1.0}
        await bench.say(0, m.ScoreReply(request_id="r0:99", verdict=SCORED))
        assert bench.client.counters == {"verdict_scored": 1.0, "stray_verdicts": 1.0}
        await bench.client.close()
        assert bench.services[0].goodbye == "worker ends"

    with_client(test)


def test_a_service_that_is_not_there_yet_is_connected_to_until_it_is() -> None:
    async def test() -> None:
        bench = Bench(1)
        bench.services[0].num_absent = 2
        (asked,) = await bench.ask("a")
        assert bench.asked() == [[]]
        running = asyncio.ensure_future(bench.client.run())
        await settle()
        assert bench.services[0].timeouts == [SILENCE_S] * 3
        assert bench.asked() == [["a"]]
        for task in (running, asked):
            task.cancel()
        await asyncio.wait([running, asked])

    asyncio.run(test())


def test_a_service_that_refuses_us_ends_the_client() -> None:
    async def test() -> None:
        bench = Bench(1)

        async def refuse(timeout_s: float) -> Any:
            raise ChannelError("refused")

        bench.services[0].connect = refuse  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup):
            await bench.client.run()

    asyncio.run(test())


def test_questions_go_to_the_service_with_the_fewest_for_each_of_its_processes() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a", "b", "c")
        assert bench.asked() == [["a", "c"], ["b"]]
        await bench.answer(1, "b", num_workers=4, num_open=1)
        await bench.ask("d", "e", "f", "g")
        assert bench.asked() == [[], ["d", "e", "f", "g"]]

    with_client(test, num_services=2)


def test_what_a_service_has_open_for_others_counts_for_a_while() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a")
        await bench.answer(0, "a", num_workers=1, num_open=2)
        await bench.ask("b", "c", "d")
        assert bench.asked() == [["a", "d"], ["b", "c"]]
        bench.clock.advance(OTHERS_S - 0.5)
        await bench.ask("e")
        assert bench.asked() == [[], ["e"]]
        bench.clock.advance(0.5)
        await bench.ask("f")
        assert bench.asked() == [["f"], []]

    with_client(test, num_services=2)


@pytest.mark.parametrize(("elapsed_s", "num_again"), [(RESEND_S, 0), (RESEND_S + 1, 1)])
def test_a_question_without_a_reply_is_asked_again_after_the_interval(elapsed_s: float, num_again: int) -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a")
        bench.asked()
        await bench.tick(elapsed_s)
        assert bench.asked() == [["a"] * num_again]
        await bench.tick(TICK_S)
        assert bench.asked() == [["a"] * (1 - num_again)]
        assert bench.client.counters == {"score_resent": 1.0}

    with_client(test)


def test_questions_are_looked_after_once_a_tick_however_many_messages_come() -> None:
    async def test(bench: Bench) -> None:
        bench.services[0].failure = DeadlineExceeded("room", "the service", TICK_S)
        await bench.ask("a")
        bench.services[0].failure = None
        await bench.tick(TICK_S)
        assert bench.asked() == [["a"]], "what could not be sent goes with the next tick"
        bench.services[0].failure = DeadlineExceeded("room", "the service", TICK_S)
        await bench.ask("b")
        bench.services[0].failure = None
        await bench.tick(TICK_S / 2)
        assert bench.asked() == [[]]
        await bench.tick(TICK_S / 2)
        assert bench.asked() == [["b"]]

    with_client(test)


@pytest.mark.parametrize("error", [WireError("no"), TypeError("no"), ValueError("no"), NotImplementedError("no")])
def test_what_cannot_be_sent_at_all_is_invalid(error: Exception) -> None:
    async def test(bench: Bench) -> None:
        bench.services[0].failure = error
        (asked,) = await bench.ask("a")
        verdict = await asked
        assert (verdict.kind, verdict.reason) == ("invalid", "the answer cannot be sent to the reward service: no")
        assert bench.client.counters == {"verdict_invalid": 1.0}

    with_client(test)


@pytest.mark.parametrize(
    ("num_services", "silence_s", "is_moved"),
    [
        (2, MOVE_S, False),
        (2, MOVE_S + 1, True),
        (1, MOVE_S + 1, False),
        (1, SILENCE_S, False),
        (1, SILENCE_S + 1, False),
    ],
)
def test_questions_of_a_silent_service_move_where_another_takes_them(
    num_services: int, silence_s: float, is_moved: bool
) -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a")
        bench.asked()
        bench.services[0].hub_silence_s = silence_s
        await bench.tick(TICK_S, 0)
        assert bench.asked() == [[], ["a"]][:num_services] if is_moved else [[]] * num_services
        assert bench.client.counters.get("score_moved", 0.0) == is_moved
        await bench.ask("b")
        is_given_up = is_moved or silence_s > SILENCE_S
        assert ("b" in bench.services[0].take_asked()) == (num_services == 1 and not is_given_up)
        bench.services[0].hub_silence_s = 0.0
        await bench.tick(TICK_S, 0)
        await bench.ask("c")
        assert "c" in bench.services[0].take_asked(), "it speaks again"

    with_client(test, num_services=num_services)


def test_a_full_service_is_asked_again_once_it_answers_or_after_a_tick() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a", "b")
        await bench.refuse(0, "b", "full")
        await bench.ask("c")
        bench.asked()
        await bench.answer(0, "a")
        assert bench.asked() == [["b", "c"]]
        await bench.refuse(0, "b", "full")
        assert bench.asked() == [[]]
        await bench.tick(TICK_S)
        assert bench.asked() == [["b"]]
        assert bench.client.counters["score_refused_full"] == 2.0

    with_client(test)


def test_a_draining_service_is_asked_no_more_until_it_is_back() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a", "b")
        bench.asked()
        await bench.refuse(0, "a", "draining")
        await bench.tick(TICK_S)
        assert bench.asked() == [[]]
        await bench.say(0, m.Welcome(run_id="r", incarnation="j"))
        assert bench.asked() == [["b", "a"]], "what it had forgotten, then what waits"
        await bench.say(0, m.Goodbye(reason="drained"))
        await bench.ask("c")
        assert bench.asked() == [[]]
        assert bench.client.counters == {
            "score_refused_draining": 1.0, "reward_restarts": 1.0, "score_resent": 1.0,
        }  # fmt: skip

    with_client(test)


def test_waiting_questions_go_a_few_with_every_verdict_and_more_with_every_tick() -> None:
    async def test(bench: Bench) -> None:
        waiting = [f"w{number:02}" for number in range(FEED + PROBE + 3)]
        await bench.ask("a", "b")
        await bench.refuse(0, "b", "full")
        await bench.ask(*waiting)
        bench.asked()
        await bench.answer(0, "a")
        assert bench.asked() == [["b", *waiting[: FEED - 1]]]
        await bench.tick(TICK_S)
        assert bench.asked() == [waiting[FEED - 1 : FEED - 1 + PROBE]]

    with_client(test)


def test_no_more_questions_are_out_than_may_be() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("a", "b", "c")
        assert bench.asked() == [["a", "b"]]
        await bench.answer(0, "a")
        assert bench.asked() == [["c"]]

    with_client(test, max_in_flight=2)


def test_a_question_nobody_waits_for_is_forgotten_wherever_it_is() -> None:
    async def test(bench: Bench) -> None:
        (sent, refused) = await bench.ask("a", "b")
        await bench.refuse(0, "b", "draining")
        bench.asked()
        for task in (sent, refused):
            task.cancel()
        await settle()
        assert bench.client.num_outstanding == 0
        await bench.say(0, m.Welcome(run_id="r", incarnation="j"))
        assert bench.asked() == [[]]

    with_client(test)


@pytest.mark.parametrize(
    ("is_up", "words"), [(True, "the reward service did not return a verdict"), (False, "unreachable")]
)
def test_a_question_beyond_its_deadline_says_whether_the_service_was_there(is_up: bool, words: str) -> None:
    async def test(bench: Bench) -> None:
        if not is_up:
            bench.services[0].hub_silence_s = SILENCE_S + 1
            await bench.tick(TICK_S)
        (asked,) = await bench.ask("a")
        verdict = await asked
        assert verdict.kind == "crashed"
        assert words in verdict.reason
        assert bench.client.counters == {"verdict_crashed": 1.0}

    with_client(test, total_deadline_s=0.0)


def test_a_silent_service_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    service, clock = Service(), VirtualClock()
    client = RewardClient(
        [service], name="w", deadline_s=1.0, total_deadline_s=1.0, silence_s=SILENCE_S, tick_s=TICK_S, clock=clock
    )
    (link,) = client._links
    link.is_up = True

    async def look(silence_s: float) -> int:
        service.hub_silence_s = silence_s
        clock.advance(TICK_S)
        await link._look_after()
        return caplog.text.count("is not responding")

    async def body() -> None:
        assert [await look(silence_s) for silence_s in (0.0, SILENCE_S, SILENCE_S + 1, 90.0, 0.0, 90.0)] == [
            0, 0, 1, 1, 1, 2,
        ]  # fmt: skip

    with caplog.at_level("WARNING"):
        asyncio.run(body())


@pytest.mark.parametrize(
    ("is_up", "words"),
    [(True, "the reward service did not return a verdict within 12 s"), (False, "unreachable for 12 s")],
)
def test_without_an_answer_the_verdict_says_how_long_it_was_waited_for(is_up: bool, words: str) -> None:
    client = object.__new__(RewardClient)
    client.clock = SimpleNamespace(monotonic_s=lambda: 112.0)
    client._links = [SimpleNamespace(is_up=is_up)]  # type: ignore[list-item]
    verdict = client._no_answer(100.0)
    assert (verdict.kind, verdict.wall_s) == ("crashed", 12.0)
    assert words in verdict.reason
