"""Answers that are streamed while they are sampled: the SDKs of both makers, and what no part may show too early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from agent_policy import ADD, ASK, TEMPLATE, Policy, asked
from agent_policy import serving as training
from aiohttp import web
from chat_tokenizer import byte_tokenizer
from jumping_loop import run

from areal_like.errors import EngineError
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.agent import endpoint as module
from rollout.agent import streaming
from rollout.agent.dialect import Opening, Reply
from rollout.agent.endpoint import Endpoint
from rollout.agent.listener import DIALECTS, application, runner_of
from rollout.agent.streaming import COMMENT, Part, StreamedResponse
from rollout.agent.token_requests import TokenRequests
from rollout.chat.formats import FORMATS
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.tokens import PromptTokens, PromptTooLong

CHAT = "/v1/chat/completions"
PATHS = [dialect.path for dialect in DIALECTS if not isinstance(dialect, TokenRequests)]  # which refuses streams


class Engine:
    """Says one line; all before its first `|` is there before it may go on."""

    def __init__(self, line: str, error: Exception | None = None) -> None:
        self.tokenizer = byte_tokenizer(TEMPLATE)
        stop = self.tokenizer.eos_token_id
        self.tokens = PromptTokens(self.tokenizer, template=None, add_bos="auto", max_context=2000, stop_ids=(stop,))
        begun, self.rest = line.split("|", 1)
        self.begun, self.error = begun, error
        self.capabilities = SimpleNamespace(num_slots=2, max_context=2000)
        self.going = asyncio.Event()
        self.running = dict[int, Segment]()
        self.num_turns_queued = 0
        """While a request is queued, it has no progress."""

    def segment(self, text: str) -> Segment:
        made = self.tokens.encode(text)
        return Segment(made, np.full(len(made), -0.5, np.float32), np.zeros(len(made), np.int32))

    def progress(self) -> dict[int, Segment]:
        return self.running

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        for _ in range(self.num_turns_queued):
            await asyncio.sleep(0.002)
        self.running[request.request_id] = self.segment(self.begun)
        await self.going.wait()
        if self.error is not None:
            raise self.error
        segment = self.segment(self.begun + self.rest)
        return GenerationOutcome(request_id=request.request_id, segment=segment, end_reason="stop")


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[tuple[Endpoint, str]]:
    sampling = Sampling(temperature=1.0, max_new_tokens=0)
    endpoint = Endpoint(engine, engine.tokens, FORMATS["hermes"], sampling=sampling, key="k")  # type: ignore[arg-type]
    runner = runner_of(application(endpoint, models=("tiny",)))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield endpoint, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)


def body_of(path: str) -> dict[str, Any]:
    asked = {"input": "3 and 4?"} if path.endswith("responses") else {**ASK, "max_tokens": 500}
    return {**asked, "stream": True}


def streamed(engine: Engine, path: str, until: str) -> tuple[str, str, Endpoint]:
    """What a client reads up to `until`, and after the engine goes on."""

    async def talk() -> Any:
        key = aiohttp.ClientSession(headers={"x-api-key": "k"})
        async with asyncio.timeout(300), serving(engine) as (endpoint, address), key as client:  # noqa: SIM117
            async with client.post(address + path, json=body_of(path)) as response:
                assert response.content_type == "text/event-stream"
                before = ""
                while until not in before:
                    before += (await response.content.readany()).decode()
                engine.going.set()
                return before, (await response.content.read()).decode(), endpoint

    return asyncio.run(talk())


@pytest.mark.parametrize("path", PATHS)
def test_text_reaches_the_client_before_the_answer_is_complete_and_the_rest_at_its_end(path: str) -> None:
    before, after, _ = streamed(Engine("<think>Hm</think>The sum |is 7.<|im_end|>"), path, '"The sum"')
    assert '"Hm"' in before
    assert '" is 7."' in after
    assert "Hm" not in after.replace('"Hm"', "") or path.endswith("responses"), "no text comes twice"


@pytest.mark.parametrize("queued", [0, 5])
def test_the_first_token_is_shown_at_once_and_a_queued_request_is_waited_for(queued: int) -> None:
    engine = Engine("a|bc<|im_end|>")
    engine.num_turns_queued = queued
    before, after, _ = streamed(engine, CHAT, '"a"')
    assert '"a"' in before
    assert '"bc"' in after


def test_both_sdks_read_answers_that_come_in_parts() -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")

    async def talk() -> None:
        line = '<think>Hm.</think>One, |two. <tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call><|im_end|>'
        engine = Engine(line)
        async with (
            asyncio.timeout(300),
            serving(engine) as (_, address),
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=address, api_key="k", max_retries=0) as other,
        ):
            parts, names = [], []
            async with client.chat.completions.stream(**ASK, tools=[ADD]) as chunks:
                async for chunk in chunks:
                    if chunk.type == "content.delta" and chunk.delta:
                        parts.append(chunk.delta)
                        engine.going.set()
                    elif chunk.type == "tool_calls.function.arguments.done":
                        names.append(chunk.name)
            assert ("".join(parts), names) == ("One, two.", ["add"])
            assert len(parts) == 2, "the first part came before the engine went on"
            engine.going.clear()
            tool = {"name": "add", "input_schema": {"type": "object"}}
            async with other.messages.stream(
                model="tiny", max_tokens=500, messages=ASK["messages"], tools=[tool]
            ) as events:
                texts = []
                async for event in events:
                    if event.type == "text":
                        texts.append(event.text)
                        engine.going.set()
                final = await events.get_final_message()
            assert len(texts) == 2
            assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
            assert (final.content[0].thinking, final.content[1].text) == ("Hm.", "One, two.")
            engine.going.clear()
            stream = await client.responses.create(model="tiny", input="3?", stream=True)
            kinds = []
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    engine.going.set()
            assert kinds.count("response.output_text.delta") == 2
            assert kinds[-1] == "response.completed"
            assert event.response.output_text == "One, two. <tool_call>" + line.split("<tool_call>")[1].removesuffix(
                "<|im_end|>"
            ), "without tools a call is text"

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("path", "said"), list(zip(PATHS, ['"error": {', '"type": "error"', "event: error"], strict=True))
)
def test_an_engine_that_fails_in_mid_stream_ends_it_with_an_error_and_the_server(path: str, said: str) -> None:
    engine = Engine("The sum |is", EngineError("the engine thread died"))
    _, after, endpoint = streamed(engine, path, '"The sum"')
    assert said in after
    assert "the engine failed: the engine thread died" in after
    assert (endpoint.broken.is_set(), str(endpoint.engine_error)) == (True, "the engine thread died")
    assert endpoint.counts["agent_refused"] == 1


def test_a_request_that_cannot_be_answered_is_refused_before_its_stream_begins() -> None:
    async def talk() -> Any:
        engine = Engine("x|y")
        body = {**body_of(PATHS[0]), "messages": [{"role": "user", "content": "x" * 3000}]}
        async with serving(engine) as (_, address), aiohttp.ClientSession() as client:  # noqa: SIM117
            async with client.post(address + PATHS[0], json=body, headers={"x-api-key": "k"}) as response:
                return response.status, await response.json()

    status, answer = asyncio.run(talk())
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# ---------------------------------------------------------------- before the answer


@pytest.fixture
def comments_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "COMMENT_S", 0.001)


@pytest.mark.parametrize("path", PATHS)
def test_a_response_begins_with_comments_while_its_answer_waits(path: str, comments_often: None) -> None:
    policy = Policy("<think>Hm.</think>7<|im_end|>")
    policy.going.clear()

    async def talk() -> tuple[str, str]:
        async with asyncio.timeout(300), training(policy) as (_, address, client):  # noqa: SIM117
            async with client.post(address + path, json=body_of(path)) as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")
                before = ""
                while before.count(COMMENT) < 3:
                    before += (await response.content.readany()).decode()
                assert not policy.answers
                policy.going.set()
                return before, (await response.content.read()).decode()

    before, after = asyncio.run(talk())
    assert before.replace(COMMENT, "") == ""
    *events, end = after.replace(COMMENT, "").split("\n\n")
    assert end == ""
    assert all(one.startswith(("data: ", "event: ")) for one in events), "no event is divided by a comment"
    assert '"Hm."' in after
    assert '"7"' in after


def test_comments_come_only_where_nothing_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "StreamResponse", Sent)
    asked = DIALECTS[0].read(body_of(PATHS[0]), lambda index: [])
    longer_s = 1.5 * streaming.COMMENT_S

    async def send() -> list[int]:
        response = StreamedResponse(None, DIALECTS[0].stream(asked))  # type: ignore[arg-type]
        seen = []
        async with response.waiting():
            for number, wait_s in enumerate((0.6 * streaming.COMMENT_S, 0.6 * streaming.COMMENT_S, longer_s)):
                await asyncio.sleep(wait_s)
                seen.append(response.response.written.count(COMMENT) if response.response else 0)
                await response.part(Part(Opening(0, 1, 3), "", "7" * (number + 1)))
        await asyncio.sleep(longer_s)
        return [*seen, response.response.written.count(COMMENT)]  # type: ignore[union-attr]

    assert run(send()) == [0, 0, 1, 1], "after the longest wait alone, and not after the block"


def test_both_sdks_read_streams_that_begin_with_comments(comments_often: None) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    policy = Policy(*["<think>Hm.</think>7<|im_end|>"] * 3)

    async def talk() -> Any:
        async with (
            asyncio.timeout(300),
            training(policy) as (agent, address, _),
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=agent.secret, max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=address, api_key=agent.secret, max_retries=0) as other,
        ):
            seen: list[Any] = []
            for send in (
                lambda: client.chat.completions.create(**ASK, stream=True),
                lambda: client.responses.create(model="policy", input="3 and 4?", stream=True),
                lambda: other.messages.create(**ASK, max_tokens=99, stream=True),
            ):
                policy.going.clear()
                stream = await send()  # returns when the response begins
                assert len(policy.answers) == len(seen)
                policy.going.set()
                seen.append([event async for event in stream])
            return seen

    chat, responses, messages = asyncio.run(talk())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "7"
    assert (responses[0].type, responses[-1].response.output_text) == ("response.created", "7")
    assert (messages[0].type, messages[-1].type) == ("message_start", "message_stop")
    assert [one.delta.text for one in messages if one.type == "content_block_delta" and one.delta.type == "text_delta"]


def test_an_error_after_comments_is_the_error_event_of_each_dialect_and_the_next_request_is_answered(
    comments_often: None,
) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    policy = Policy(*[PromptTooLong("the context is full") for _ in range(3)], "7<|im_end|>")

    async def talk() -> Any:
        async with (
            asyncio.timeout(300),
            training(policy) as (agent, address, _),
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=agent.secret, max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=address, api_key=agent.secret, max_retries=0) as other,
        ):

            async def read(sending: Any) -> list[Any]:
                policy.going.clear()
                stream = await sending
                policy.going.set()
                return [event async for event in stream]

            with pytest.raises(openai.APIError, match="the context is full") as by_chat:
                await read(client.chat.completions.create(**ASK, stream=True))
            with pytest.raises(anthropic.APIStatusError, match="prompt is too long: the context is full"):
                await read(other.messages.create(**ASK, max_tokens=99, stream=True))
            (by_responses,) = await read(client.responses.create(model="policy", input="3 and 4?", stream=True))
            after = await read(client.chat.completions.create(**ASK, stream=True))
            return by_chat.value, by_responses, after, agent

    by_chat, by_responses, after, agent = asyncio.run(talk())
    assert by_chat.code == "context_length_exceeded"
    assert (by_responses.type, by_responses.code) == ("error", "context_length_exceeded")
    assert by_responses.message == "the context is full"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in after) == "7"
    assert agent.counts["agent_refused"] == 3


def test_a_stream_of_an_agent_that_is_refused_before_the_first_comment_has_the_status_of_its_error() -> None:
    ((status, answer),), _ = asked(
        Policy(), {**ASK, "stream": True, "messages": [{"role": "user", "content": "x" * 9000}]}
    )
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


# ---------------------------------------------------------------- what is settled


LINES = {
    "hermes": '<think>a <thin b</think> c < d <tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>',
    "qwen_xml": "c <tool <tool_call><function=add></function></tool_call><|im_end|>",
    "llama3_json": '{"name": "add", "parameters": {}}<|eot_id|>',
    "llama_pythonic": "[add(x=1)]<|eot_id|>",
    "mistral": "[THINK]a[/THINK]c [TOOL [TOOL_CALLS]add[ARGS]{}</s>",
    "deepseek_v31": "c<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("reads_calls", [True, False])
def test_what_is_shown_of_a_beginning_is_the_beginning_of_what_the_whole_says(name: str, reads_calls: bool) -> None:
    chat, line = FORMATS[name], LINES[name]
    whole = chat.parse(line)
    content = whole.content
    if not reads_calls:  # all of it is text then
        after = line.partition(chat.reasoning_marks[1])
        content = (after[2] if after[1] else line).strip()
    longest = ""
    for size in range(len(line) + 1):
        reasoning, shown = chat.parse_begun(line[:size], is_reasoning_open=False, reads_calls=reads_calls)
        assert whole.reasoning.startswith(reasoning)
        assert content.startswith(shown)
        longest = max(longest, shown, key=len)
    assert longest or reads_calls, "text is shown as it comes"
    assert "call" not in longest.lower() or not reads_calls


def test_reasoning_that_the_prompt_opened_and_half_a_character_are_no_content() -> None:
    chat = FORMATS["hermes"]
    assert chat.parse_begun("Hm, 3", is_reasoning_open=True, reads_calls=False) == ("Hm, 3", "")
    assert chat.parse_begun("Hm</think>é\ufffd", is_reasoning_open=True, reads_calls=False) == ("Hm", "é")


class Sent:
    """Stands for a response; keeps what is written."""

    def __init__(self, **_: Any) -> None:
        self.written = ""

    async def prepare(self, request: Any) -> None:
        self.request = request

    async def write(self, data: bytes) -> None:
        self.written += data.decode()

    async def write_eof(self) -> None:
        self.written += "."


@pytest.mark.parametrize(
    ("parts", "reasoning", "content", "sent"),
    [
        ([("", "7")], "", "7 it is", ["7", " it is"]),
        ([("", "7"), ("", "7")], "", "7", ["7"]),
        ([], "", "", []),
        ([("", "I see")], "I see", "7", ["I see", "7"]),  # closed a second time
    ],
)
def test_no_text_is_sent_twice_or_left_out(
    parts: Any, reasoning: str, content: str, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "StreamResponse", Sent)
    asked = DIALECTS[0].read(body_of(PATHS[0]), lambda index: [])
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    tokens = np.zeros(1, np.int32)
    reply = Reply(0, 1, message, "stop", 3, [], tokens, tokens.astype(np.float32), [])

    async def send() -> str:
        response = StreamedResponse(None, DIALECTS[0].stream(asked))  # type: ignore[arg-type]
        for one in parts:
            await response.part(Part(Opening(0, 1, 3), *one))
        await response.end(reply)
        return response.response.written  # type: ignore[union-attr]

    lines = [line for line in asyncio.run(send()).split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert [delta["content"] for delta in deltas if delta.get("content")] == sent
