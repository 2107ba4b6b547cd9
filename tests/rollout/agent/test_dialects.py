"""The three dialects as the SDKs of OpenAI and Anthropic speak them: every token once, and never tokenised again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from agent_policy import ADD, ASK, CALL, Policy, serving

from areal_like.trajectory import check_disjoint

pytestmark = pytest.mark.skipif(
    find_spec("openai") is None or find_spec("anthropic") is None,
    reason="the packages openai and anthropic are missing",
)

FUNCTION = ADD["function"]
LINES = (CALL, "<think>So.</think>Seven<|im_end|>", "Bye", "Un<|im_end|>")
"""Of a policy: a call, an answer, one that is cut by the limit of two tokens, and one more. The byte tokenizer has
tokens for `<think>` and such, so that text written again would not be tokenised as it was sampled."""
LIMITS = (99, 99, 2, 99)
TOOL_RESULT, THANKS, ON = "7", "thanks", "go on"

Talk = Callable[["Client", bool], Awaitable[list[dict[str, Any]]]]


class Sdk:
    """A package, imported at its first use: every stream of tests collects this file, and one runs it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


openai, anthropic = Sdk("openai"), Sdk("anthropic")


class Client:
    """Both SDKs, for one session."""

    def __init__(self, address: str, secret: str) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=secret)
        self.anthropic = anthropic.AsyncAnthropic(base_url=address, api_key=secret)


def summary(text: str, calls: list[tuple[str, Any]], why: Any, usage: tuple[int, int], reasoning: str | None) -> Any:
    return {"text": text, "calls": calls, "why": why, "usage": usage, "reasoning": reasoning}


async def by_chat(client: Client, is_streamed: bool) -> list[dict[str, Any]]:
    messages: list[Any] = [{"role": "user", "content": "3 and 4?"}]
    seen = []
    for limit, then in zip(LIMITS, (None, THANKS, ON, ""), strict=True):
        settings = {"model": "policy", "messages": messages, "tools": [ADD], "max_tokens": limit}
        if is_streamed:
            async with client.openai.chat.completions.stream(
                **settings, stream_options={"include_usage": True}
            ) as stream:
                try:
                    made = await stream.get_final_completion()
                except openai.LengthFinishReasonError as error:  # the helper's way to say so
                    made = error.completion
        else:
            made = await client.openai.chat.completions.create(**settings)
        (choice,) = made.choices
        message, calls = choice.message, choice.message.tool_calls or []
        arguments = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        usage = (made.usage.prompt_tokens, made.usage.completion_tokens)
        reasoning = getattr(message, "reasoning_content", None)
        seen.append(summary(message.content or "", arguments, choice.finish_reason, usage, reasoning))
        # As hand-written loops do: the reasoning does not come back.
        back = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        results = [{"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT} for call in calls]
        messages = [*messages, back, *(results or [{"role": "user", "content": then}])]
    return seen


async def by_responses(client: Client, is_streamed: bool, *, is_chained: bool = False) -> list[dict[str, Any]]:
    items: list[Any] = [{"role": "user", "content": "3 and 4?"}]
    seen, before = [], None
    tool = {"type": "function", **FUNCTION}
    for limit, then in zip(LIMITS, (None, THANKS, ON, ""), strict=True):
        settings = {"model": "policy", "input": items, "tools": [tool], "max_output_tokens": limit}
        if before:
            settings["previous_response_id"] = before
        if is_streamed:
            made: Any = None
            async with client.openai.responses.stream(**settings) as stream:
                async for event in stream:
                    if event.type in ("response.completed", "response.incomplete"):
                        made = event.response
                        assert event.type == f"response.{made.status}"
            assert made is not None
        else:
            made = await client.openai.responses.create(**settings)
        calls = [item for item in made.output if item.type == "function_call"]
        arguments = [(call.name, json.loads(call.arguments)) for call in calls]
        reasoning = [item.content[0].text for item in made.output if item.type == "reasoning"]
        why = made.incomplete_details.reason if made.incomplete_details else made.status
        usage = (made.usage.input_tokens, made.usage.output_tokens)
        seen.append(summary(made.output_text, arguments, why, usage, reasoning[0] if reasoning else None))
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": TOOL_RESULT} for call in calls]
        new = results or [{"role": "user", "content": then}]
        if is_chained:
            before, items = made.id, new
        else:
            items = [*items, *(item.model_dump(exclude_none=True) for item in made.output), *new]
    return seen


async def by_chained_responses(client: Client, is_streamed: bool) -> list[dict[str, Any]]:
    return await by_responses(client, is_streamed, is_chained=True)


async def by_messages(client: Client, is_streamed: bool) -> list[dict[str, Any]]:
    messages: list[Any] = [{"role": "user", "content": "3 and 4?"}]
    seen = []
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    for limit, then in zip(LIMITS, (None, THANKS, ON, ""), strict=True):
        settings = {"model": "policy", "messages": messages, "tools": [tool], "max_tokens": limit}
        if is_streamed:
            async with client.anthropic.messages.stream(**settings) as stream:
                made = await stream.get_final_message()
        else:
            made = await client.anthropic.messages.create(**settings)
        calls = [block for block in made.content if block.type == "tool_use"]
        text = "".join(block.text for block in made.content if block.type == "text")
        reasoning = [block.thinking for block in made.content if block.type == "thinking"]
        usage = (made.usage.input_tokens, made.usage.output_tokens)
        arguments = [(call.name, call.input) for call in calls]
        seen.append(summary(text, arguments, made.stop_reason, usage, reasoning[0] if reasoning else None))
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT} for call in calls]
        messages = [
            *messages,
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": results or then},
        ]
    return seen


REASONS = {
    by_chat: ["tool_calls", "stop", "length", "stop"],
    by_responses: ["completed", "completed", "max_output_tokens", "completed"],
    by_chained_responses: ["completed", "completed", "max_output_tokens", "completed"],
    by_messages: ["tool_use", "end_turn", "max_tokens", "end_turn"],
}


def talked(policy: Policy, talk: Callable[[Client], Awaitable[Any]], **session: Any) -> Any:
    async def run() -> Any:
        async with serving(policy, **session) as (agent, address, _):
            client = Client(address, agent.secret)
            async with client.openai, client.anthropic:
                return await talk(client), agent

    return asyncio.run(run())


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("talk", REASONS)
def test_a_conversation_of_four_turns_keeps_every_sampled_token_once(talk: Talk, is_streamed: bool) -> None:
    policy = Policy(*LINES)
    seen, agent = talked(policy, lambda client: talk(client, is_streamed))
    assert [one["text"] for one in seen] == ["", "Seven", "By", "Un"]
    assert [one["calls"] for one in seen] == [[("add", {"x": 3, "y": 4})], [], [], []]
    assert [one["reasoning"] for one in seen] == ["Hm.", "So.", None, None]
    assert [one["why"] for one in seen] == REASONS[talk]
    assert [one["usage"] for one in seen] == [
        (len(prompt), len(answer)) for prompt, answer in zip(policy.prompts, policy.answers, strict=True)
    ]
    (trajectory,) = agent.store.trajectories()
    assert agent.store.num_rendered_again == 0
    check_disjoint([trajectory])
    sampled = [token for answer in policy.answers for token in answer]
    assert trajectory.tokens_T[trajectory.loss_mask_T].tolist() == sampled
    for prompt, answer, following in zip(policy.prompts, policy.answers, policy.prompts[1:], strict=False):
        assert following[: len(prompt) + len(answer)] == prompt + answer, "as it was sampled"
    given = policy.tokenizer.decode(policy.prompts[-1])
    assert [word in given for word in (TOOL_RESULT, THANKS, ON)] == [True] * 3


def test_all_dialects_make_the_same_prompts_of_the_same_conversation() -> None:
    policies = [Policy(*LINES) for _ in REASONS]
    for policy, talk in zip(policies, REASONS, strict=True):
        talked(policy, lambda client, talk=talk: talk(client, False))  # type: ignore[misc]
    assert all(policy.prompts == policies[0].prompts for policy in policies)


@pytest.mark.parametrize(
    ("send", "status", "said"),
    [
        (lambda one: one.openai.chat.completions.create(model="m", messages=[]), 400, "at least one message"),
        (lambda one: one.openai.responses.create(model="m", input=[]), 400, "at least one message"),
        (lambda one: one.anthropic.messages.create(model="m", messages=[], max_tokens=1), 400, "at least one message"),
        (lambda one: one.openai.responses.create(model="m", input="x" * 9000), 400, "no room for an answer"),
        (
            lambda one: one.anthropic.messages.create(
                model="m", messages=[{"role": "user", "content": "x" * 9000}], max_tokens=1
            ),
            400,
            "prompt is too long",
        ),
        (lambda one: one.openai.responses.create(model="m", input="x", previous_response_id="resp_7"), 404, "answer 7"),
        (lambda one: one.openai.responses.create(model="m", input="x", previous_response_id="x"), 404, "response x"),
        (lambda one: one.openai.responses.create(model="m", input="x", background=True), 400, "background"),
        (
            lambda one: one.openai.responses.create(model="m", input="x", tools=[{"type": "web_search"}]),
            400,
            "every tool must be",
        ),
        (
            lambda one: one.anthropic.messages.create(
                model="m", messages=ASK["messages"], max_tokens=1, stop_sequences=["x"]
            ),
            400,
            "stop_sequences",
        ),
        (
            lambda one: one.anthropic.messages.create(
                model="m", messages=ASK["messages"], max_tokens=1, tool_choice={"type": "any"}
            ),
            400,
            "tool_choice must be auto or none",
        ),
        (lambda one: one.anthropic.messages.batches.list(), 404, "Not Found"),
        (lambda one: one.openai.embeddings.create(model="m", input="x"), 404, "Not Found"),
    ],
)  # fmt: skip
def test_a_refusal_is_an_error_of_the_sdk_and_the_next_request_is_answered(send: Any, status: int, said: str) -> None:
    async def talk(client: Client) -> Any:
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as refused:
            await send(client)
        after = await client.openai.responses.create(model="m", input="x")
        return refused.value, after.output_text

    (error, text), agent = talked(Policy("7<|im_end|>"), talk)
    assert error.status_code == status
    assert said in error.message
    kind = error.body["error"]["type"] if isinstance(error, anthropic.APIError) else error.type
    assert kind == (
        "not_found_error" if status == 404 and isinstance(error, anthropic.APIError) else "invalid_request_error"
    )
    assert (text, agent.counts["agent_refused"], agent.counts["agent_requests"]) == ("7", 1, 2)


def test_a_wrong_key_is_the_authentication_error_of_each_sdk() -> None:
    async def run() -> Any:
        async with serving(Policy()) as (_, address, _):
            client = Client(address, "wrong")
            async with client.openai, client.anthropic:
                with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
                    await client.openai.responses.create(model="m", input="x")
                with pytest.raises(anthropic.AuthenticationError, match="ANTHROPIC_API_KEY"):
                    await client.anthropic.messages.create(model="m", messages=ASK["messages"], max_tokens=1)

    asyncio.run(run())


def test_models_and_numbers_of_tokens_reach_both_sdks() -> None:
    async def talk(client: Client) -> Any:
        names = [one.id async for one in client.openai.models.list()]
        names += [one.id async for one in client.anthropic.models.list()]
        counted = await client.anthropic.messages.count_tokens(model="m", messages=ASK["messages"])
        made = await client.anthropic.messages.create(model="m", messages=ASK["messages"], max_tokens=9)
        return names, counted.input_tokens, made.usage.input_tokens

    (names, counted, used), _ = talked(Policy("7<|im_end|>"), talk)
    assert names == ["policy", "policy"]
    assert counted == used


def test_both_sdks_show_the_ids_and_log_probs_of_streamed_answers() -> None:
    policy = Policy(*["<think>Hm.</think>7<|im_end|>"] * 3)
    more = {"return_token_ids": True}

    async def talk(client: Client) -> Any:
        stream = await client.openai.chat.completions.create(
            model="m", messages=ASK["messages"], stream=True, logprobs=True, extra_body=more
        )
        chunks = [chunk async for chunk in stream]
        chat = (chunks[0].prompt_token_ids, chunks[-1].choices[0].token_ids, chunks[-1].choices[0].logprobs.content)
        stream = await client.openai.responses.create(
            model="m", input="3 and 4?", stream=True, include=["message.output_text.logprobs"], extra_body=more
        )
        made = [event async for event in stream][-1].response
        responses = (made.prompt_token_ids, made.token_ids, made.output[-1].content[0].logprobs)
        stream = await client.anthropic.messages.create(
            model="m", messages=ASK["messages"], max_tokens=99, stream=True, extra_body=more
        )
        ended = [event async for event in stream][-2]
        return chat, responses, (ended.prompt_token_ids, ended.token_ids)

    (chat, responses, messages), _ = talked(policy, talk)
    prompt, answer = policy.prompts[0], policy.answers[0]
    assert [one[:2] for one in (chat, responses, messages)] == [(prompt, answer)] * 3
    for logprobs in (chat[2], responses[2]):
        assert [one.logprob for one in logprobs] == [-0.5] * len(answer)
        assert "".join(one.token for one in logprobs) == "<think>Hm.</think>7<|im_end|>"


@pytest.mark.parametrize("send", [
    lambda one: one.openai.chat.completions.create(model="m", messages=ASK["messages"], logprobs=True, top_logprobs=2),
    lambda one: one.openai.responses.create(model="m", input="x", top_logprobs=2),
])  # fmt: skip
def test_log_probs_of_other_tokens_are_refused(send: Any) -> None:
    async def talk(client: Client) -> Any:
        with pytest.raises(openai.BadRequestError, match="top_logprobs is not supported here: only the log-probs of"):
            await send(client)

    talked(Policy(), talk)
