"""The time limit of a program, on a clock that jumps to the next timer: what it counts, and what it does not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from agent_policy import ASK, Policy
from jumping_loop import run

from rollout.agent.dialect import AgentRequest, BadRequest
from rollout.agent.program_time import ProgramTime
from rollout.agent.session import AgentSession, RequestName
from rollout.agent.workflow import AgentWorkflow
from rollout.chat.formats import FORMATS


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_time_in_which_any_request_is_answered_is_not_counted() -> None:
    async def play() -> list[float]:
        time, seen = ProgramTime(), []
        for change in (None, time.hold, time.hold, time.release, time.release, time.hold):
            if change is not None:
                change()
            await asyncio.sleep(10.0)
            seen.append(time.seconds)
        return seen

    assert run(play()) == pytest.approx([10.0, 10.0, 10.0, 10.0, 20.0, 20.0])


def test_the_limit_counts_from_the_call_and_is_reached_at_once_when_no_request_is_left() -> None:
    async def play() -> Any:
        time = ProgramTime()
        await asyncio.sleep(50.0)  # before the program starts
        taken = asyncio.create_task(time.taken(5.0))
        await asyncio.sleep(3.0)
        time.hold()
        await asyncio.sleep(1000.0)
        is_over_early = taken.done()
        time.release()
        await taken
        return is_over_early, now_s()

    assert run(play()) == (False, pytest.approx(1055.0))


def ask_of(session: AgentSession, **more: Any) -> asyncio.Task[None]:
    settings = {"tools": [], "reads_calls": False, "max_tokens": None, "is_streamed": False, **more}
    request = AgentRequest(model="m", messages=list(ASK["messages"]), **settings)

    async def ask() -> None:
        async with session.answering(request, RequestName("", b"digest")):
            pass

    return asyncio.create_task(ask())


@pytest.mark.parametrize(("is_asked", "end_s"), [(True, 1007.0), (False, 5.0)])
def test_a_program_whose_answer_takes_longer_than_its_limit_is_not_ended_for_it(is_asked: bool, end_s: float) -> None:
    async def forever(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def play() -> Any:
        policy = Policy("7<|im_end|>", "8<|im_end|>")
        policy.going.clear()  # as while new weights are loaded, or the trainer has the shared device
        session = AgentSession(policy, FORMATS["hermes"])  # type: ignore[arg-type]
        program: Any = SimpleNamespace(output=SimpleNamespace(read=forever), wait=forever)
        ended = asyncio.create_task(AgentWorkflow(command=["sh"], timeout_s=5.0)._ended(session, program))
        if is_asked:
            await asyncio.sleep(2.0)
            asked = [ask_of(session), ask_of(session)]
            await asyncio.sleep(1002.0)
            assert not ended.done()
            policy.going.set()
            await asyncio.gather(*asked)
        failure, at_s = await ended, now_s()
        await session.close()
        return failure, at_s

    failure, at_s = run(play())
    assert failure == ("timed_out", "the program took longer than 5 s, without its requests")
    assert at_s == pytest.approx(end_s)


@pytest.mark.parametrize("way", ["refused", "disconnected", "closed"])
def test_time_goes_on_after_a_request_without_an_answer(way: str) -> None:
    async def play() -> Any:
        policy = Policy("7<|im_end|>")
        policy.going.clear()
        session = AgentSession(policy, FORMATS["hermes"], no_tools="no tools here")  # type: ignore[arg-type]
        asked = ask_of(session, tools=[{}] if way == "refused" else [])
        await asyncio.sleep(10.0)
        if way == "disconnected":
            asked.cancel()
            await asyncio.sleep(10.0)  # the answer is still completed, for a retry
            policy.going.set()
        if way == "closed":
            await session.close()
        with pytest.raises((BadRequest, asyncio.CancelledError)):
            await asked
        begun_s = session.own_time.seconds
        await asyncio.sleep(10.0)
        await session.close()
        return begun_s, session.own_time.seconds

    begun_s, end_s = run(play())
    assert (begun_s, end_s) == (pytest.approx(10.0 if way == "refused" else 0.0), pytest.approx(begun_s + 10.0))
