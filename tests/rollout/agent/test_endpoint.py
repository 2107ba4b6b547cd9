"""A policy that is served, by a scripted engine: the SDKs of both makers, settings of requests, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from agent_policy import ADD, ASK, CALL, TEMPLATE, until
from aiohttp import web
from chat_tokenizer import byte_tokenizer

from areal_like.errors import EngineError
from areal_like.safety import SafetyFilter, SafetyStage
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.agent import endpoint as module
from rollout.agent import kept_conversations
from rollout.agent.dialect import BadRequest
from rollout.agent.endpoint import Endpoint, sampling_of
from rollout.agent.listener import application, runner_of
from rollout.chat.formats import FORMATS
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.tokens import PromptTokens

CHAT = "/v1/chat/completions"
THINKS = TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")


class Engine:
    """Says its lines, one for each request; a line that is an exception is raised."""

    def __init__(self, *lines: Any, template: str = TEMPLATE, num_slots: int = 2) -> None:
        self.tokenizer = byte_tokenizer(template)
        stop = self.tokenizer.eos_token_id
        self.tokens = PromptTokens(self.tokenizer, template=None, add_bos="auto", max_context=2000, stop_ids=(stop,))
        self.lines, self.asked = list(lines), list[GenerationRequest]()
        self.capabilities = SimpleNamespace(num_slots=num_slots, max_context=2000)
        self.num_cancelled = 0
        self.going = asyncio.Event()
        self.going.set()

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        self.asked.append(request)
        try:
            await self.going.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        made = self.tokens.encode(line)[: request.sampling.max_new_tokens]
        segment = Segment(made, np.full(len(made), -0.5, np.float32), np.zeros(len(made), np.int32))
        is_stopped = bool(made[-1] in request.sampling.stop_token_ids)
        return GenerationOutcome(
            request_id=request.request_id, segment=segment, end_reason="stop" if is_stopped else "length"
        )

    def prompt(self, place: int) -> str:
        return str(self.tokenizer.decode(self.asked[place].prompt_P))


def endpoint_of(engine: Engine, **options: Any) -> Endpoint:
    default = {"sampling": Sampling(temperature=1.0, max_new_tokens=0), "key": "k"}
    return Endpoint(engine, engine.tokens, FORMATS["hermes"], **{**default, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    engine: Engine, *, models: Sequence[str] = ("tiny",), **options: Any
) -> AsyncIterator[tuple[Endpoint, str]]:
    endpoint = endpoint_of(engine, models=models, **options)
    runner = runner_of(application(endpoint, models=models, wrong_key="wrong key"))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield endpoint, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def asked(engine: Engine, *requests: Any, path: str = CHAT, **options: Any) -> list[tuple[int, Any]]:
    async def ask() -> Any:
        headers = {"Authorization": "Bearer k"}
        async with serving(engine, **options) as (_, address), aiohttp.ClientSession(headers=headers) as client:
            answers = []
            for body in requests:
                async with client.post(address + path, json=body) as response:
                    answers.append((response.status, await response.json()))
            return answers

    return asyncio.run(ask())


# ---------------------------------------------------------------- the SDKs


def test_both_sdks_get_answers_calls_and_streams() -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    engine = Engine("7<|im_end|>", CALL, "streamed<|im_end|>", "8<|im_end|>", "9<|im_end|>", CALL, "10<|im_end|>")

    async def talk() -> None:
        async with (
            serving(engine) as (_, address),
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=address, api_key="k", max_retries=0) as other,
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0) as stranger,
        ):
            assert [one.id async for one in client.models.list()] == ["tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
            with pytest.raises(openai.NotFoundError, match="there is no model big; the only model is tiny"):
                await client.models.retrieve("big")
            chat = await client.chat.completions.create(**ASK, temperature=0, logprobs=True)
            assert chat.choices[0].message.content == "7"
            assert len(chat.choices[0].logprobs.content) == 2
            called = (await client.chat.completions.create(**ASK, tools=[ADD])).choices[0]
            assert (called.finish_reason, called.message.tool_calls[0].function.name) == ("tool_calls", "add")
            stream = await client.chat.completions.create(**ASK, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(parts) == "streamed"
            first = await client.responses.create(model="tiny", input="3 and 5?", instructions="Add.")
            second = await client.responses.create(model="tiny", input="more", previous_response_id=first.id)
            assert (first.output_text, second.output_text) == ("8", "9")
            messages = [{"role": "user", "content": "3 and 4?"}]
            tool = {"name": "add", "input_schema": {"type": "object"}}
            made = await other.messages.create(model="tiny", max_tokens=200, messages=messages, tools=[tool])
            assert [block.type for block in made.content] == ["thinking", "tool_use"]
            async with other.messages.stream(model="tiny", max_tokens=99, messages=messages) as events:
                assert await events.get_final_text() == "10"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await other.messages.create(
                    model="tiny", max_tokens=9, messages=[{"role": "user", "content": "x" * 3000}]
                )
            with pytest.raises(openai.AuthenticationError, match="wrong key"):
                await stranger.models.list()

    asyncio.run(talk())
    assert engine.asked[0].sampling.temperature == 0.0
    conversation = engine.prompt(4)
    assert "3 and 5?" in conversation
    assert "8<|im_end|>" in conversation
    assert "Add." not in conversation, "instructions belong to their own request"
    assert len({request.request_id for request in engine.asked}) == len(engine.asked)


# ---------------------------------------------------------------- one request


def test_an_answer_has_the_tokens_that_fit_or_fewer_where_a_limit_says_so() -> None:
    engine = Engine("a<|im_end|>", "b" * 50, "c" * 50)
    answers = asked(engine, ASK, {**ASK, "max_tokens": 7}, {**ASK, "max_completion_tokens": 5}, path=CHAT)
    limits = [request.sampling.max_new_tokens for request in engine.asked]
    assert limits == [2000 - len(engine.asked[0].prompt_P), 7, 5]
    assert [body["choices"][0]["finish_reason"] for _, body in answers] == ["stop", "length", "length"]
    engine = Engine("a" * 50)
    asked(engine, {**ASK, "max_tokens": 30}, sampling=Sampling(max_new_tokens=10))
    assert engine.asked[0].sampling.max_new_tokens == 10


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, "n is not supported here: send several requests"),
        ({"stop": ["x"]}, "stop is not supported"),
        ({"temperature": -0.1}, "temperature must be a number from 0 to 100"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be a number from 1e-06 to 1"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "leaves no room for an answer"),
        ({"tools": [ADD]}, "set the format"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_in_a_sentence(body: Any, said: str) -> None:
    ((status, answer), (after, _)) = asked(Engine("7<|im_end|>"), {**ASK, **body}, ASK, no_tools="set the format")
    assert (status, after) == (400, 200)
    assert said in answer["error"]["message"]


def test_settings_of_a_request_count_and_others_are_the_server_s() -> None:
    default = Sampling(temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(3,))
    sampling, seed = sampling_of({}, default)
    assert sampling == default
    assert sampling_of({}, default)[1] != seed, "answers differ"
    asked_for = {"temperature": 0, "top_p": 0.5, "top_k": 2, "seed": -1}
    sampling, seed = sampling_of(asked_for, default)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_token_ids) == (0.0, 0.5, 2, (3,))
    assert seed == sampling_of(asked_for, default)[1]
    assert 0 <= seed < 2**63


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_a_request_is_answered_by_the_adapter_that_it_names(path: str) -> None:
    engine = Engine(*["7<|im_end|>"] * 4)
    body = {"input": "3?"} if path == "/v1/responses" else {**ASK, "max_tokens": 9}
    requests = [{**body, "model": name} for name in ("sql", "tiny", "chat", None, "other")]
    *answers, (status, refused) = asked(engine, *requests, path=path, models=("tiny", "sql", "chat"))
    assert [status for status, _ in answers] == [200] * 4
    assert [request.adapter for request in engine.asked] == ["sql", "", "chat", ""]
    assert [answer["model"] for _, answer in answers] == ["sql", "tiny", "chat", "policy"]
    assert status == 404
    assert refused["error"]["message"] == "there is no model other; the models are tiny, sql, chat"


def test_a_stream_and_a_count_of_an_unknown_model_are_refused_where_there_are_adapters() -> None:
    engine = Engine("7<|im_end|>")
    unknown = {**ASK, "model": "other", "max_tokens": 9, "stream": True}
    for path in (CHAT, "/v1/messages/count_tokens"):
        ((status, body),) = asked(engine, unknown, path=path, models=("tiny", "sql"))
        assert (status, body["error"]["message"]) == (404, "there is no model other; the models are tiny, sql")


def test_all_models_are_listed() -> None:
    async def ask() -> tuple[list[str], list[Any]]:
        headers = {"Authorization": "Bearer k"}
        async with (
            serving(Engine(), models=("tiny", "sql")) as (_, address),
            aiohttp.ClientSession(headers=headers) as client,
        ):
            listed = await (await client.get(f"{address}/v1/models")).json()
            each = [await (await client.get(f"{address}/v1/models/{name}")).json() for name in ("sql", "other")]
            return [one["id"] for one in listed["data"]], each

    listed, (known, unknown) = asyncio.run(ask())
    assert (listed, known["id"]) == (["tiny", "sql"], "sql")
    assert unknown["error"]["code"] == "model_not_found"


def test_without_adapters_any_name_is_answered_by_the_model() -> None:
    engine = Engine("7<|im_end|>")
    ((status, answer),) = asked(engine, {**ASK, "model": "gpt"})
    assert (status, answer["model"], engine.asked[0].adapter) == (200, "gpt", "")


def test_reasoning_that_a_client_sends_back_reaches_the_template() -> None:
    engine = Engine("7<|im_end|>", template=THINKS)
    said = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    asked(engine, {"messages": [*ASK["messages"], said, {"role": "user", "content": "on"}]})
    assert "two and two4<|im_end|>" in engine.prompt(0)


def test_calls_of_different_answers_have_different_ids() -> None:
    body = {**ASK, "tools": [ADD]}
    answers = asked(Engine(CALL, CALL), body, body)
    ids = {call["id"] for _, answer in answers for call in answer["choices"][0]["message"]["tool_calls"]}
    assert len(ids) == 2


# ---------------------------------------------------------------- conversations


def test_only_the_newest_answers_of_responses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_conversations, "MAX_KEPT", 2)
    body = {"model": "m", "input": "x"}
    lines = ["1<|im_end|>"] * 6

    async def talk() -> Any:
        async with serving(Engine(*lines)) as (endpoint, address), aiohttp.ClientSession() as client:
            for one in (body, {**body, "store": False}, body, body):
                headers = {"x-api-key": "k"}
                await client.post(f"{address}/v1/responses", json=one, headers=headers)
            await client.post(address + CHAT, json=ASK, headers={"x-api-key": "k"})
            return endpoint

    endpoint = asyncio.run(talk())
    assert list(endpoint._kept._kept) == [2, 3]
    with pytest.raises(BadRequest, match="resp_0, or it is no longer stored"):
        endpoint.conversation(0)


def test_conversations_have_a_limit_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_conversations, "MAX_KEPT_CHARS", 400)
    engine = Engine("1<|im_end|>", "2<|im_end|>")
    answers = asked(engine, {"input": "x" * 200}, {"input": "y" * 200}, path="/v1/responses")
    again = asked(engine, {"input": "z", "previous_response_id": "resp_0"}, path="/v1/responses")
    assert [status for status, _ in (*answers, *again)] == [200, 200, 404]


# ---------------------------------------------------------------- many clients


def test_a_client_that_leaves_ends_its_answer_and_nobody_else_s() -> None:
    engine = Engine("7<|im_end|>")
    engine.going.clear()

    async def talk() -> Any:
        headers = {"Authorization": "Bearer k"}
        async with serving(engine) as (endpoint, address), aiohttp.ClientSession(headers=headers) as client:

            async def post() -> Any:
                async with client.post(address + CHAT, json=ASK) as response:
                    return await response.json()

            leaves, stays = asyncio.create_task(post()), asyncio.create_task(post())
            await until(lambda: len(engine.asked) == 2)
            leaves.cancel()
            await until(lambda: engine.num_cancelled)
            engine.going.set()
            answer = await stays
            await endpoint.idle.wait()
            return answer, endpoint

    answer, endpoint = asyncio.run(talk())
    assert answer["choices"][0]["message"]["content"] == "7"
    assert (engine.num_cancelled, endpoint.counts["agent_disconnects"], endpoint.num_running) == (1, 1, 0)


def test_too_many_requests_and_those_at_the_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_PER_SLOT", 1)
    engine = Engine(*["7<|im_end|>"] * 2, num_slots=1)
    engine.going.clear()

    async def talk() -> Any:
        headers = {"Authorization": "Bearer k"}
        async with serving(engine) as (endpoint, address), aiohttp.ClientSession(headers=headers) as client:

            async def post() -> Any:
                async with client.post(address + CHAT, json=ASK) as response:
                    return response.status, response.headers.get("x-should-retry"), await response.json()

            running = [asyncio.create_task(post()) for _ in range(2)]
            await until(lambda: len(engine.asked) == 2)
            busy = await post()
            endpoint.is_closing = True
            closing = await post()
            engine.going.set()
            return busy, closing, [await one for one in running]

    busy, closing, answers = asyncio.run(talk())
    assert busy[:2] == (429, None), "a client may send it again"
    assert "2 requests are already waiting" in busy[2]["error"]["message"]
    assert (closing[0], closing[2]["error"]["message"]) == (503, "the server is shutting down")
    assert [status for status, _, _ in answers] == [200, 200]


def test_an_engine_that_fails_is_reported_and_the_next_request_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    answers = asked(Engine(EngineError("out of memory"), "7<|im_end|>"), ASK, ASK)
    assert [status for status, _ in answers] == [500, 200]
    assert answers[0][1]["error"]["message"] == "the engine failed: out of memory"
    assert "out of memory" in caplog.text


def test_a_key_is_made_where_none_is_given() -> None:
    one, other = endpoint_of(Engine(), key=""), endpoint_of(Engine(), key="")
    assert len(one.secret) >= 32
    assert one.secret != other.secret
    assert json.dumps(one.secret).isascii()


# ---------------------------------------------------------------- safety


def safety(*stages: dict[str, Any]) -> SafetyFilter:
    return SafetyFilter([SafetyStage.model_validate(one) for one in stages], "--safety")


BAD = {"kind": "words", "options": {"words": ["bad"]}}
MASK = {"kind": "regex", "action": "mask", "options": {"patterns": ["secret"]}}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def test_requests_and_answers_that_a_stage_refuses_get_an_error_and_masked_ones_are_answered() -> None:
    engine = Engine("a bad answer<|im_end|>", "my secret<|im_end|>")
    (first, refused), (second, answer), (third, masked) = asked(
        engine, says("a bad question"), says("hello"), says("what is secret?"), safety=safety(BAD, MASK)
    )
    assert (first, second, third) == (400, 400, 200)
    assert refused["error"]["code"] == answer["error"]["code"] == "content_refused"
    assert refused["error"]["message"] == "the request is refused by a safety stage of this server"
    assert answer["error"]["message"] == "the answer is refused by a safety stage of this server"
    assert masked["choices"][0]["message"]["content"] == "my [masked]"
    assert len(engine.asked) == 2
    assert "what is [masked]?" in engine.prompt(1)


def test_a_stream_sends_nothing_before_the_stages_have_seen_the_whole_answer() -> None:
    async def read() -> list[str]:
        engine = Engine("my secret<|im_end|>", "a bad answer<|im_end|>")
        headers = {"Authorization": "Bearer k"}
        async with (
            serving(engine, safety=safety(BAD, MASK)) as (_, address),
            aiohttp.ClientSession(headers=headers) as client,
        ):
            bodies = []
            for _ in range(2):
                async with client.post(address + CHAT, json=says("hello", stream=True)) as response:
                    bodies.append(await response.text())
            return bodies

    masked, refused = asyncio.run(read())
    assert "my [masked]" in masked
    assert "secret" not in masked
    assert "content_refused" in refused
    assert "bad answer" not in refused


def test_calls_of_an_answer_are_masked_and_tokens_are_not_returned() -> None:
    call = CALL.replace("3", "secret", 1)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    engine = Engine(call, "x<|im_end|>")
    (status, answer), (refused, why), (also, _) = asked(
        engine, says("hello", tools=tools), says("hello", logprobs=True), says("hello", return_token_ids=True),
        safety=safety(MASK),
    )  # fmt: skip
    assert status == 200
    assert "secret" not in json.dumps(answer)
    assert "[masked]" in json.dumps(answer["choices"][0]["message"])
    assert (refused, also) == (400, 400)
    assert "tokens and log-probs are not returned" in why["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_masked_arguments_of_a_call_are_still_json(path: str, is_streamed: bool) -> None:
    arguments = {"x": 4111111111111111, "y": [{"a.b@c.org": "to a.b@c.org"}, True, None, 1.5, "hello"]}
    engine = Engine(f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call><|im_end|>")
    tool = {"name": "add", "input_schema": {"type": "object"}} if path != CHAT else ADD
    body = {**ASK, "tools": [tool], "max_tokens": 500, "stream": is_streamed}
    headers = {"Authorization": "Bearer k"}

    async def ask() -> tuple[int, str]:
        stage = {"kind": "personal_data", "action": "mask"}
        async with (
            serving(engine, safety=safety(stage)) as (_, address),
            aiohttp.ClientSession(headers=headers) as client,
            client.post(address + path, json=body) as response,
        ):
            return response.status, await response.text()

    status, text = asyncio.run(ask())
    assert status == 200
    sent = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    found = list(called(sent or json.loads(text)))
    assert {"x": "[masked]", "y": [{"[masked]": "to [masked]"}, True, None, 1.5, "hello"]} in found


def called(sent: Any) -> Iterator[Any]:
    """Arguments of all calls in what a client received."""
    if isinstance(sent, list):
        for one in sent:
            yield from called(one)
    elif isinstance(sent, dict):
        for key, one in sent.items():
            if key in ("arguments", "partial_json") and one:
                yield json.loads(one)
            elif key == "input":
                yield one
            yield from called(one)


def test_arguments_of_earlier_calls_are_looked_at_and_others_stay_as_they_were_written() -> None:
    def request(arguments: str) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"model": "tiny", "messages": [*said, {"role": "tool", "tool_call_id": "c", "content": "7"}]}

    endpoint = endpoint_of(Engine(), safety=safety(BAD, MASK))
    for written, expected in (
        ('{"x":  1.0}', '{"x":  1.0}'), ('{"x": "my secret"}', '{"x": "my [masked]"}'), ("a secret", "a [masked]"),
        ('{"x": NaN, "y": "secret"}', '{"x": NaN, "y": "[masked]"}'),
        ('{"x": "secret", "x": 1}', '{"x": "[masked]", "x": 1}'),
    ):  # fmt: skip
        message = request(written)["messages"][1]
        assert endpoint._looked_at(message, "prompts")["tool_calls"][0]["function"]["arguments"] == expected
    ((status, answer),) = asked(Engine(), request('{"x": "hello\\nbad"}'), safety=safety(BAD))
    assert (status, answer["error"]["code"]) == (400, "content_refused")


def test_answers_in_tokens_are_refused_where_stages_look_at_answers() -> None:
    for look_at in ("answers", "prompts"):
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9}}
        stages = safety({**MASK, "look_at": look_at})
        ((status, why),) = asked(Engine("a secret<|im_end|>"), body, path="/inference/v1/generate", safety=stages)
        assert (status, why["error"]["code"]) == (400, "content_refused")


def test_a_stage_of_the_user_that_raises_is_an_error_of_the_server() -> None:
    def look(text: str, part: str) -> Any:
        raise RuntimeError("my mistake")

    broken = SimpleNamespace(looks_at=lambda part: True, look=look)
    ((status, answer),) = asked(Engine("x<|im_end|>"), says("hello"), safety=broken)
    assert (status, answer["error"]["code"]) == (500, "safety_failed")
    assert "my mistake" not in json.dumps(answer)
