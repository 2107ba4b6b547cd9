"""A session without HTTP: which answer a request gets, what is in it, and what becomes of those under way."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from agent_policy import ADD, ASK, CALL, Policy, until

from areal_like.tool_call import ToolCall
from rollout.agent.dialect import AgentRequest, BadRequest, Reply
from rollout.agent.session import AgentSession, RequestName, _checked, _is_number
from rollout.chat.formats import FORMATS

USER = ASK["messages"][0]
NAME = RequestName("", b"digest")
RETRY = RequestName("", b"digest", is_retry=True)


def request(*messages: Any, **more: Any) -> AgentRequest:
    settings = {"tools": [], "reads_calls": False, "max_tokens": None, "is_streamed": False, **more}
    return AgentRequest(model="m", messages=[USER, *messages], **settings)


def played(policy: Policy, play: Callable[[AgentSession], Awaitable[Any]], **session: Any) -> Any:
    """What the play returns; nothing may reach the loop's handler of errors."""

    async def run() -> tuple[Any, list[Any]]:
        unseen: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        agent = AgentSession(policy, FORMATS["hermes"], **session)  # type: ignore[arg-type]
        found = await play(agent)
        await agent.close()
        del agent
        gc.collect()
        await asyncio.sleep(0)
        return found, unseen

    gc.collect()  # clients of other tests close themselves in whatever loop runs when they are collected
    found, unseen = asyncio.run(run())
    assert unseen == []
    return found


async def ask(agent: AgentSession, what: AgentRequest, name: RequestName = NAME, *, is_lost: bool = False) -> Reply:
    """The answer; one that is lost does not reach the client."""
    try:
        async with agent.answering(what, name) as reply:
            if is_lost:
                raise ConnectionError
    except ConnectionError:
        pass
    return reply


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize(
    ("lost", "repeated"),
    [
        ((False,), [0, 0]),
        ((True,), [0, 0]),
        ((False, False), [1, 1]),
        ((False, True), [1, 1]),
        ((True, False), [0, 1]),
        ((True, True), [0, 1, 1]),
        ((False, True, True, False), [1, 2, 3]),
    ],
)
def test_a_retry_gets_the_oldest_answer_that_no_client_has_or_else_the_newest(
    lost: tuple[bool, ...], repeated: list[int]
) -> None:
    policy = Policy(*(f"{number}<|im_end|>" for number in range(9)))

    async def play(agent: AgentSession) -> Any:
        made = [await ask(agent, request(), is_lost=one) for one in lost]
        again = [await ask(agent, request(), RETRY) for _ in repeated]
        return [made.index(one) for one in again], agent.counts["agent_retries"]

    assert played(policy, play) == (repeated, len(repeated))


def test_a_retry_of_what_was_never_asked_is_a_request() -> None:
    async def play(agent: AgentSession) -> Any:
        first = await ask(agent, request(), NAME)
        other = await ask(agent, request(), RequestName("", b"other", is_retry=True))
        return first.index, other.index, agent.counts["agent_retries"]

    assert played(Policy("1<|im_end|>", "2<|im_end|>"), play) == (0, 1, 0)


def test_a_retry_under_way_keeps_the_answer_from_other_retries() -> None:
    policy = Policy("1<|im_end|>", "2<|im_end|>")
    policy.going.clear()

    async def play(agent: AgentSession) -> Any:
        gone = [asyncio.create_task(ask(agent, request())) for _ in range(2)]
        await until(lambda: len(agent._running) == 2)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        again = [asyncio.create_task(ask(agent, request(), RETRY)) for _ in range(2)]
        await until(lambda: agent.counts["agent_retries"] == 2)
        policy.going.set()
        return [(await one).index for one in again]

    assert played(policy, play) == [0, 1]


@pytest.mark.parametrize("is_retry", [False, True])
def test_a_key_names_its_request_however_often_it_is_sent(is_retry: bool) -> None:
    async def play(agent: AgentSession) -> Any:
        keyed = RequestName("k", b"digest", is_retry)
        made = [await ask(agent, request(), one) for one in (keyed, NAME, keyed)]
        with pytest.raises(BadRequest) as refused:
            await ask(agent, request(), RequestName("k", b"other", is_retry))
        return [one.index for one in made], refused.value.code

    assert played(Policy("1<|im_end|>", "2<|im_end|>"), play) == ([0, 1, 0], "idempotency_key_reused")


# ---------------------------------------------------------------- what is in an answer


def test_an_answer_holds_what_its_request_wants_and_no_more() -> None:
    policy = Policy("7<|im_end|>", "7<|im_end|>")

    async def play(agent: AgentSession) -> Any:
        wants = {"wants_logprobs": True, "wants_token_ids": True}
        made = [await ask(agent, request()), await ask(agent, request(**wants))]
        return made, agent.store.turns[0].stop

    (plain, full), stop = played(policy, play)
    assert (plain.token_texts, plain.prompt_ids, plain.num_prompt) == ([], [], len(policy.prompts[0]))
    assert (full.token_texts, full.prompt_ids) == (["7", "<|im_end|>"], policy.prompts[1])
    assert [one.message for one in (plain, full)] == [{"role": "assistant", "content": "7"}] * 2
    assert full.tokens_R.tolist() == policy.answers[1]
    assert np.array_equal(full.logprobs_R, np.full(2, -0.5, np.float32))
    assert (full.index, full.finish_reason, stop) == (1, "stop", "<|im_end|>")


def test_the_tokens_of_a_request_are_counted_without_asking_the_policy() -> None:
    policy = Policy("7<|im_end|>")

    async def play(agent: AgentSession) -> Any:
        counted = agent.num_tokens(request(tools=[ADD]))
        assert not policy.prompts
        return counted, (await ask(agent, request(tools=[ADD]))).num_prompt

    counted, num_prompt = played(policy, play)
    assert counted == num_prompt == len(policy.prompts[0])


def test_a_cut_answer_ended_with_no_token() -> None:
    async def play(agent: AgentSession) -> Any:
        reply = await ask(agent, request(max_tokens=2))
        return reply.finish_reason, reply.message["content"], agent.store.turns[0].stop, agent.last_content

    assert played(Policy("123<|im_end|>"), play) == ("length", "12", "", "12")


def test_calls_have_ids_of_their_turn_and_their_place() -> None:
    two = CALL.replace("<|im_end|>", CALL.removeprefix("<think>Hm.</think>"))

    async def play(agent: AgentSession) -> Any:
        made = [await ask(agent, request(tools=[ADD], reads_calls=True)) for _ in range(2)]
        return [[call["id"] for call in one.message["tool_calls"]] for one in made], agent.counts["agent_tool_calls"]

    assert played(Policy(CALL, two), play) == ([["c00000000"], ["c00000100", "c00000101"]], 3)


def test_no_answer_is_asked_for_in_a_context_that_is_full_to_its_last_token() -> None:
    more = ({"role": "assistant", "content": "1"}, {"role": "user", "content": "and then?"})

    def continued(max_context: int) -> tuple[Policy, Any]:
        policy = Policy("1<|im_end|>", "2<|im_end|>", max_context=max_context)

        async def play(agent: AgentSession) -> Any:
            await ask(agent, request())
            try:
                return await ask(agent, request(*more))
            except BadRequest as refused:
                return refused

        return policy, played(policy, play)

    policy, _ = continued(4000)
    size = len(policy.prompts[1])
    policy, reply = continued(size + 1)
    assert (len(policy.prompts), reply.num_prompt) == (2, size)
    policy, refused = continued(size)
    assert len(policy.prompts) == 1
    assert str(refused) == f"the messages have {size} tokens, but the context has only {size}"
    assert (refused.code, refused.param) == ("context_length_exceeded", "messages")


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize("index", [-1, 2, 99])
def test_a_conversation_is_found_by_the_index_of_its_last_answer(index: int) -> None:
    more = ({"role": "assistant", "content": "1"}, {"role": "user", "content": "on"})

    async def play(agent: AgentSession) -> Any:
        await ask(agent, request())
        await ask(agent, request(*more))
        with pytest.raises(BadRequest, match=f"there is no answer {index} in this sample") as refused:
            agent.conversation(index)
        assert (refused.value.status, refused.value.code) == (404, "not_found")
        return [agent.conversation(one) for one in (0, 1)]

    first, second = played(Policy("1<|im_end|>", "2<|im_end|>"), play)
    said = [{"role": "assistant", "content": str(number + 1), "turn": number} for number in (0, 1)]
    assert first == [USER, said[0]]
    assert second == [USER, said[0], more[1], said[1]]


def test_instructions_belong_to_no_conversation() -> None:
    async def play(agent: AgentSession) -> Any:
        instructed = AgentRequest(
            model="m", messages=[{"role": "system", "content": "s"}, USER], tools=[], reads_calls=False,
            max_tokens=None, is_streamed=False, num_instructions=1,
        )  # fmt: skip
        await ask(agent, instructed)
        return agent.conversation(0)

    assert [one["role"] for one in played(Policy("1<|im_end|>"), play)] == ["user", "assistant"]


# ---------------------------------------------------------------- the end


def test_a_request_that_waited_while_the_program_ended_does_not_reach_the_policy() -> None:
    policy = Policy("1<|im_end|>", "2<|im_end|>")
    policy.going.clear()

    async def play(agent: AgentSession) -> Any:
        asked = [asyncio.create_task(ask(agent, request())) for _ in range(2)]
        await until(lambda: len(agent._running) == 2 and policy.prompts)
        agent.is_over = True
        policy.going.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    reply, refused = played(policy, play)
    assert reply.index == 0
    assert (refused.status, refused.code) == (503, "sample_cut")
    assert len(policy.prompts) == 1


def test_answers_that_are_cancelled_and_an_error_that_nobody_waited_for_are_no_errors_of_the_worker() -> None:
    policy = Policy()
    policy.going.clear()

    async def play(agent: AgentSession) -> Any:
        asked = asyncio.create_task(ask(agent, request()))
        await until(lambda: policy.prompts)
        agent.fail(ValueError("the first one counts"))
        agent.fail(ValueError("the second"))
        await agent.close()
        assert agent.is_over
        assert not agent._running
        with pytest.raises(asyncio.CancelledError):
            await asked
        return str(agent.broken.exception())

    assert played(policy, play) == "the first one counts"


def test_an_error_of_a_sample_that_is_over_already_is_no_error_of_the_worker() -> None:
    async def play(agent: AgentSession) -> None:
        agent.fail(ValueError("nobody waits for it"))

    played(Policy(), play)


def test_no_reward_is_taken_once_the_program_has_ended() -> None:
    async def play(agent: AgentSession) -> Any:
        agent.report({"reward": 1, "components": {"x": 2}})
        agent.report({"reward": -0.5})
        agent.is_over = True
        with pytest.raises(BadRequest, match="the sample has ended") as refused:
            agent.report({"reward": 2.0})
        return agent.reward, (refused.value.status, refused.value.code)

    assert played(Policy(), play) == ((-0.5, {}), (409, "sample_ended"))


def test_the_text_that_is_handed_in_last_is_judged_instead_of_the_newest_answer() -> None:
    async def play(agent: AgentSession) -> Any:
        before = agent.judged
        agent.submit_answer({"answer": "draft"})
        agent.submit_answer({"answer": ""})
        agent.is_over = True
        with pytest.raises(BadRequest, match="the sample has ended") as refused:
            agent.submit_answer({"answer": "late"})
        agent.last_content = "7"
        return before, agent.judged, refused.value.status

    assert played(Policy(), play) == ("", "", 409)


@pytest.mark.parametrize("body", [{}, {"answer": 7}, {"answer": None}, [], {"answer": "x" * 1_000_001}])
def test_only_a_text_of_at_most_a_million_characters_is_handed_in(body: Any) -> None:
    async def play(agent: AgentSession) -> Any:
        with pytest.raises(BadRequest, match="answer must be a text of at most 1000000 characters") as refused:
            agent.submit_answer(body)
        return agent.handed_in, refused.value.param

    assert played(Policy(), play) == (None, "answer")


@pytest.mark.parametrize("components", [{"x": "1"}, {"x": 1, "y": None}, {"x": True}, [1], "x", None])
def test_components_are_an_object_of_numbers(components: Any) -> None:
    async def play(agent: AgentSession) -> Any:
        with pytest.raises(BadRequest, match="components must be an object of finite numbers") as refused:
            agent.report({"reward": 1, "components": components})
        return refused.value.param, agent.reward

    assert played(Policy(), play) == ("components", None)


def test_as_many_components_as_there_may_be_travel_with_the_reward() -> None:
    async def play(agent: AgentSession) -> Any:
        agent.report({"reward": 1, "components": {str(number): number for number in range(256)}})
        return agent.reward

    assert played(Policy(), play) == (1.0, {str(number): float(number) for number in range(256)})


# ---------------------------------------------------------------- plain functions


@pytest.mark.parametrize(
    ("value", "is_number"),
    [
        (0, True), (-1.5, True), (sys.float_info.max, True), (-sys.float_info.max, True), (10**308, True),
        (10**400, False), (float("inf"), False), (float("nan"), False), (True, False), ("1", False), (None, False),
    ],
)  # fmt: skip
def test_a_number_is_what_a_float_holds(value: Any, is_number: bool) -> None:
    assert _is_number(value) == is_number


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize(("depth", "fault"), [(100, ""), (101, "the arguments are nested too deeply")])
def test_arguments_are_nested_a_hundred_deep_at_most(opening: str, depth: int, fault: str) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    inner = opening * (depth - 1) + "1" + closing * (depth - 1)
    call = ToolCall("add", f'{{"short": [], "x": {inner}}}')
    assert _checked(call, {"add": {}}).fault == fault


def test_a_call_with_a_fault_is_shown_as_it_is() -> None:
    call = ToolCall("rm", "[" * 3000, fault="not JSON")
    assert _checked(call, {"add": {}}) is call
    unknown = _checked(ToolCall("rm", '{"x": 1}'), {"add": {}, "sub": {}})
    assert unknown.fault == "there is no tool rm; there are: add, sub"
    assert unknown.arguments == '{"name": "rm", "arguments": {"x": 1}}'
