"""The reward client against real hubs: one verdict for every question, whatever happens to the service."""

from __future__ import annotations

import asyncio
import os

import pytest
from made_keys import run_keys

from areal_like.errors import ChannelError
from areal_like.transport.channel import Peer
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from rollout.reward_client import ACCEPT, RewardClient


def peer(address, run_id="run-1", silence_s=10.0):
    hello = m.Hello(role="rollout", name="r0", pid=os.getpid(), run_id=run_id, incarnation="i")
    return Peer(
        address=address,
        hello=hello,
        curve_dir=run_keys(),
        audience="services",
        accept=ACCEPT,
        heartbeat_s=0.05,
        silence_s=silence_s,
        status=lambda: m.Heartbeat(state="score"),
    )


def make_client(*peers, **more):
    given = {"name": "r0", "deadline_s": 5.0, "total_deadline_s": 20.0, "silence_s": 10.0, "tick_s": 0.02, **more}
    return RewardClient(peers, **given)


async def until(condition):
    async with asyncio.timeout(300.0):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


class Service:
    """A reward service played on a real hub: `answers` may be switched off."""

    def __init__(self, hub):
        self.hub, self.questions, self.answers = hub, [], True
        self.task = asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            received = await self.hub.receive(0.2)
            if received is not None and isinstance(received[1], m.ScoreRequest):
                self.questions.append(received[1])
                if self.answers:
                    self.reply(received[1])

    def reply(self, question):
        verdict = Verdict(kind="scored", value=float(question.response))
        assert self.hub.send("r0", m.ScoreReply(request_id=question.request_id, verdict=verdict))

    async def die(self):
        """End abruptly: no word to anybody."""
        self.task.cancel()
        await self.hub.close()


def run(scenario):
    async def whole():
        async with asyncio.timeout(300.0):
            await scenario()

    asyncio.run(whole())


async def running(client):
    return asyncio.create_task(client.run())


async def end(client, task, *services):
    task.cancel()
    await asyncio.wait([task])
    await client.close()
    for service in services:
        await service.die()


def ask(client, fake, value, task=None):
    return asyncio.create_task(client.score(task or fake.task(), str(value), "stop", 3))


def test_every_question_gets_its_own_verdict_in_any_order(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address))
        service.answers = False
        loop = await running(client)
        asked = [ask(client, fake, value) for value in range(20)]
        await until(lambda: len(service.questions) == 20)
        assert len({question.request_id for question in service.questions}) == 20
        for question in reversed(service.questions):
            service.reply(question)
        assert [verdict.value for verdict in await asyncio.gather(*asked)] == [float(value) for value in range(20)]
        assert client.num_outstanding == 0
        await end(client, loop, service)

    run(scenario)


def test_no_more_than_max_in_flight_are_out_at_once(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address), max_in_flight=3)
        service.answers = False
        loop = await running(client)
        asked = [ask(client, fake, value) for value in range(9)]
        answered = 0
        while answered < 9:
            await until(lambda n=answered: len(service.questions) == min(n + 3, 9))
            assert client.num_outstanding <= 3
            service.reply(service.questions[answered])
            answered += 1
            await until(lambda n=answered: sum(one.done() for one in asked) == n)
        await end(client, loop, service)

    run(scenario)


def test_service_that_restarts_loses_no_verdict(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address))
        service.answers = False
        loop = await running(client)
        asked = [ask(client, fake, value) for value in range(5)]
        await until(lambda: len(service.questions) == 5)
        service.reply(service.questions[0])
        await until(lambda: asked[0].done())
        await service.die()
        late = ask(client, fake, 9)
        hub, _ = await fake.hub("reward", address)
        service = Service(hub)
        verdicts = await asyncio.gather(*asked, late)
        assert [verdict.value for verdict in verdicts] == [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]
        assert {question.response for question in service.questions} == {"1", "2", "3", "4", "9"}
        assert client.counters["reward_restarts"] == 1.0
        await end(client, loop, service)

    run(scenario)


def test_second_verdict_on_a_question_changes_nothing(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address))
        loop = await running(client)
        assert (await ask(client, fake, 1)).value == 1.0
        service.reply(service.questions[0])
        await until(lambda: client.counters.get("stray_verdicts") == 1.0)
        await end(client, loop, service)

    run(scenario)


def test_question_without_a_reply_is_asked_again(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address), resend_s=0.04)
        service.answers = False
        loop = await running(client)
        asked = ask(client, fake, 4)
        await until(lambda: len(service.questions) >= 3)
        assert len({question.request_id for question in service.questions}) == 1
        service.reply(service.questions[-1])
        assert (await asked).value == 4.0
        await end(client, loop, service)

    run(scenario)


def test_service_that_never_comes_gives_a_crashed_verdict_saying_so(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        await hub.close()
        client = make_client(peer(address), total_deadline_s=0.1)
        loop = await running(client)
        verdict = await ask(client, fake, 1)
        assert (verdict.kind, verdict.value) == ("crashed", None)
        assert "the reward service was unreachable for" in verdict.reason
        await end(client, loop)

    run(scenario)


def test_service_that_never_answers_gives_a_crashed_verdict_saying_so(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address), total_deadline_s=0.2)
        service.answers = False
        loop = await running(client)
        await until(lambda: client._links[0].is_up)
        verdict = await ask(client, fake, 1)
        assert verdict.kind == "crashed"
        assert "the reward service did not return a verdict" in verdict.reason
        assert client.num_outstanding == 0
        assert not client._links[0].pending
        await end(client, loop, service)

    run(scenario)


def test_without_addresses_the_verdict_is_invalid_at_once(fake):
    async def scenario():
        verdict = await make_client().score(fake.task(), "1", "stop", 1)
        assert (verdict.kind, verdict.reason) == (
            "invalid",
            "there is no reward service, because reward.scorers is empty",
        )

    run(scenario)


def test_row_that_cannot_travel_is_invalid_and_disturbs_nobody(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address))
        loop = await running(client)
        bad = ask(client, fake, 1, fake.task(prompt={"prompt": "a", "thing": object()}))
        good = ask(client, fake, 2)
        assert (await bad).kind == "invalid"
        assert "cannot be sent" in (await bad).reason
        assert (await good).value == 2.0
        await end(client, loop, service)

    run(scenario)


def test_least_busy_address_is_asked(fake):
    async def scenario():
        hubs = [await fake.hub("reward") for _ in range(2)]
        services = [Service(hub) for hub, _ in hubs]
        client = make_client(*[peer(address) for _, address in hubs])
        for service in services:
            service.answers = False
        loop = await running(client)
        await until(lambda: all(link.is_up for link in client._links))
        asked = [ask(client, fake, value) for value in range(10)]
        await until(lambda: sum(len(service.questions) for service in services) == 10)
        assert [len(service.questions) for service in services] == [5, 5]
        for service in services:
            for question in service.questions:
                service.reply(question)
        await asyncio.gather(*asked)
        await end(client, loop, *services)

    run(scenario)


def test_questions_of_a_silent_address_move_to_the_other(fake):
    async def scenario():
        hubs = [await fake.hub("reward") for _ in range(2)]
        services = [Service(hub) for hub, _ in hubs]
        client = make_client(*[peer(address, silence_s=0.3) for _, address in hubs], silence_s=0.3)
        services[0].answers = False
        loop = await running(client)
        await until(lambda: all(link.is_up for link in client._links))
        asked = [ask(client, fake, value) for value in range(6)]
        await until(lambda: len(services[0].questions) == 3)
        await services[0].die()
        verdicts = await asyncio.gather(*asked)
        assert [verdict.value for verdict in verdicts] == [float(value) for value in range(6)]
        await end(client, loop, services[1])

    run(scenario)


def test_service_of_another_run_ends_the_client(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address, run_id="another"))
        with pytest.raises(ExceptionGroup) as caught:
            await client.run()
        assert caught.group_contains(ChannelError, match="another")
        await end(client, asyncio.create_task(asyncio.sleep(0)), service)

    run(scenario)


def test_cancelled_question_leaves_nothing_behind(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address))
        service.answers = False
        loop = await running(client)
        asked = ask(client, fake, 1)
        await until(lambda: service.questions)
        asked.cancel()
        await asyncio.wait([asked])
        assert client.num_outstanding == 0
        service.reply(service.questions[0])
        await until(lambda: client.counters.get("stray_verdicts") == 1.0)
        await end(client, loop, service)

    run(scenario)


def refuse(service, question, reason):
    assert service.hub.send("r0", m.ScoreRefused(request_id=question.request_id, reason=reason))


def test_a_refused_question_goes_to_the_other_and_a_draining_address_is_asked_no_more(fake):
    async def scenario():
        hubs = [await fake.hub("reward") for _ in range(2)]
        services = [Service(hub) for hub, _ in hubs]
        client = make_client(*[peer(address) for _, address in hubs])
        services[0].answers = False
        loop = await running(client)
        await until(lambda: all(link.is_up for link in client._links))
        asked = [ask(client, fake, value) for value in range(2)]
        await until(lambda: len(services[0].questions) == 1)
        refuse(services[0], services[0].questions[0], "draining")
        assert [(await one).value for one in asked] == [0.0, 1.0]
        assert [(await ask(client, fake, value)).value for value in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert len(services[0].questions) == 1, "it drains"
        assert len(services[1].questions) == 7
        await end(client, loop, *services)

    run(scenario)


def test_questions_that_nobody_takes_wait_and_go_as_verdicts_make_room(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address), tick_s=5.0)
        service.answers = False
        loop = await running(client)
        asked = [ask(client, fake, value) for value in range(6)]
        await until(lambda: len(service.questions) == 6)
        for question in service.questions[2:]:
            refuse(service, question, "full")
        await until(lambda: client.counters.get("score_refused_full") == 4.0)
        assert client.num_outstanding == 6
        service.answers = True
        for question in [*service.questions[:2], *service.questions[6:]]:  # a tick may have sent some again
            service.reply(question)
        assert [(await one).value for one in asked] == [float(value) for value in range(6)]
        await end(client, loop, service)

    run(scenario)


def test_what_a_service_has_open_for_others_counts_as_its_load(fake):
    async def scenario():
        hubs = [await fake.hub("reward") for _ in range(2)]
        services = [Service(hub) for hub, _ in hubs]
        client = make_client(*[peer(address) for _, address in hubs])
        for service in services:
            service.answers = False
        loop = await running(client)
        await until(lambda: all(link.is_up for link in client._links))
        first = [ask(client, fake, value) for value in range(2)]
        await until(lambda: all(len(service.questions) == 1 for service in services))
        for service, num_open in zip(services, (8, 1), strict=True):
            verdict = Verdict(kind="scored", value=0.0)
            reply = m.ScoreReply(
                request_id=service.questions[0].request_id, verdict=verdict, num_open=num_open, num_workers=2
            )
            assert service.hub.send("r0", reply)
        await asyncio.gather(*first)
        more = [ask(client, fake, value) for value in range(5)]
        await until(lambda: sum(len(service.questions) for service in services) == 7)
        assert [len(service.questions) for service in services] == [1, 6]
        for question in services[1].questions[1:]:
            services[1].reply(question)
        await asyncio.gather(*more)
        await end(client, loop, *services)

    run(scenario)


def test_an_answer_too_long_to_score_is_invalid_and_is_not_sent(fake):
    async def scenario():
        hub, address = await fake.hub("reward")
        service, client = Service(hub), make_client(peer(address))
        loop = await running(client)
        verdict = await client.score(fake.task(), "x" * (m.MAX_RESPONSE_CHARS + 1), "stop", 1)
        assert verdict.kind == "invalid"
        assert str(m.MAX_RESPONSE_CHARS) in verdict.reason
        assert not service.questions
        assert client.counters["verdict_invalid"] == 1.0
        await end(client, loop, service)

    run(scenario)
