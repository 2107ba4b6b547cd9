"""The address of an agent: who may ask, what cannot be read, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from agent_policy import ASK, Policy, asked, serving, until
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from rollout.agent.dialect import BadRequest
from rollout.agent.listener import ANTHROPIC, OPENAI, _dialect_of, _name_of, application
from rollout.agent.session import AgentSession, RequestName
from rollout.chat.formats import FORMATS

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_client_that_goes_away_gets_its_answer_by_a_retry_and_another_client_its_own(
    is_streamed: bool, leaves_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ("given up<|im_end|>", "read<|im_end|>")
    policy = Policy(*(lines if leaves_first else reversed(lines)), "next<|im_end|>")
    policy.going.clear()
    body = {**ASK, "stream": is_streamed}

    async def talk() -> Any:
        async with serving(policy) as (agent, address, client):

            async def post(**headers: str) -> str:
                async with client.post(address + CHAT, json=body, headers=headers) as response:
                    return await response.text()

            asked = []
            for number in (1, 2):
                asked.append(asyncio.create_task(post()))
                await until(lambda number=number: len(agent._running) == number)  # type: ignore[misc]
            gone, stays = asked if leaves_first else reversed(asked)
            gone.cancel()
            await until(lambda: agent.counts["agent_disconnects"] == 1)
            retried = asyncio.create_task(post(**{"x-stainless-retry-count": "1"}))
            await until(lambda: agent.counts["agent_retries"] == 1)
            policy.going.set()
            return [await stays, await retried, await post()], agent

    with caplog.at_level(logging.WARNING):
        texts, agent = asyncio.run(talk())
    assert [word in text for word, text in zip(("read", "given up", "next"), texts, strict=True)] == [True] * 3
    assert not agent.counts["agent_refused"]
    assert not caplog.records
    assert len(agent.store.trajectories()) == 3


def test_a_refusal_is_not_retried_by_clients_and_a_defect_ends_the_sample() -> None:
    policy = Policy(ValueError("oh no"))

    async def talk() -> Any:
        async with serving(policy) as (agent, address, client):
            async with client.post(address + CHAT, json={}) as response:
                assert (response.status, response.headers["x-should-retry"]) == (400, "false")
            async with client.post(address + CHAT, json=ASK) as response:
                assert (response.status, response.headers["x-should-retry"]) == (503, "false")
                assert (await response.json())["error"]["code"] == "sample_cut"
            with pytest.raises(ValueError, match="oh no"):
                await agent.broken

    asyncio.run(talk())


@pytest.mark.parametrize("name", ["stream", "logprobs", "return_token_ids"])
def test_a_flag_that_is_no_flag_is_refused(name: str) -> None:
    answers, _ = asked(Policy(), {**ASK, name: "false"})
    assert (answers[0][0], answers[0][1]["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("head", "sent", "status"),
    [
        ({"Content-Encoding": "gzip"}, b"0123456789", 400),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * (33 << 20), 1), 413),
        ({"Content-Encoding": "br"}, b"0123456789", 400),
        ({"Content-Length": "-1"}, b"", 400),
        ({"Content-Type": "application/json; charset=bogus"}, b"\xff", 400),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_without_a_traceback(
    head: dict[str, str], sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk() -> Any:
        async with serving(Policy("7<|im_end|>")) as (agent, address, client):
            host, port = address.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            lines = {"Host": host, "Authorization": f"Bearer {agent.secret}", "Content-Length": str(len(sent)), **head}
            written = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            writer.write(f"POST {CHAT} HTTP/1.1\r\n{written}\r\n".encode() + sent)
            first = await reader.readline()
            writer.close()
            async with client.post(address + CHAT, json=ASK) as response:
                assert response.status == 200
            assert not agent.broken.done()
            return int(first.split()[1])

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(talk()) == status
    assert not caplog.records


def test_a_client_that_goes_away_while_its_answer_is_written_is_counted_and_may_ask_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = web.Response.write_eof
    lost = [ConnectionResetError("gone")]

    async def write_eof(self: web.Response, data: bytes = b"") -> None:
        if lost and self.status == 200:
            raise lost.pop()
        await written(self, data)

    monkeypatch.setattr(web.Response, "write_eof", write_eof)
    policy = Policy("7<|im_end|>")

    async def talk() -> Any:
        async with serving(policy) as (agent, address, client):
            with contextlib.suppress(aiohttp.ClientError):
                async with client.post(address + CHAT, json=ASK) as response:
                    await response.read()
            async with client.post(address + CHAT, json=ASK, headers={"x-stainless-retry-count": "1"}) as response:
                body = await response.json()
            return body["choices"][0]["message"]["content"], agent

    with caplog.at_level(logging.WARNING):
        content, agent = asyncio.run(talk())
    assert (content, agent.counts["agent_disconnects"], agent.counts["agent_retries"]) == ("7", 1, 1)
    assert not agent.broken.done()
    assert not caplog.records


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_key_may_come_with_either_header(scheme: str) -> None:
    async def talk() -> Any:
        async with serving(Policy()) as (agent, address, _), aiohttp.ClientSession() as client:
            statuses = []
            for key in (agent.secret, "wrong", ""):
                for head in ({"Authorization": f"{scheme} {key}"}, {"x-api-key": key}):
                    async with client.get(f"{address}/v1/models", headers=head) as response:
                        statuses.append(response.status)
            both = {"Authorization": "Bearer of-the-machine", "x-api-key": agent.secret}
            async with client.get(f"{address}/v1/models", headers=both) as response:
                return [*statuses, response.status]

    assert asyncio.run(talk()) == [200, 200, 401, 401, 401, 401, 200]


def test_the_row_of_the_sample_and_the_model_have_addresses() -> None:
    async def talk() -> Any:
        async with serving(Policy(), row={"prompt": "3 and 4?"}) as (_, address, client):
            async with client.get(f"{address}/rl/row") as response:
                row = await response.json()
            async with client.get(f"{address}/v1/models") as response:
                return row, await response.json()

    row, models = asyncio.run(talk())
    assert row == {"prompt": "3 and 4?"}
    assert models == {
        "object": "list",
        "has_more": False,
        "data": [
            {
                "id": "policy", "object": "model", "created": 0, "owned_by": "areal_like", "max_model_len": 4000,
                "type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z",
            }
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "headers", "is_anthropic"),
    [
        (CHAT, {}, False),
        ("/v1/messages", {}, True),
        ("/v1/messages/batches", {}, True),
        ("/v1/models", {"anthropic-version": "2023-06-01"}, True),
        ("/v1/models", {}, False),
    ],
)
def test_a_refusal_is_in_the_form_that_its_client_reads(path: str, headers: Any, is_anthropic: bool) -> None:
    request = make_mocked_request("POST", path, headers=headers)
    assert _dialect_of(request) is (ANTHROPIC if is_anthropic else OPENAI)


@pytest.mark.parametrize(
    ("headers", "is_retry"),
    [({}, False), ({"x-stainless-retry-count": "0"}, False), ({"x-stainless-retry-count": ""}, False),
     ({"x-stainless-retry-count": "1"}, True), ({"X-Stainless-Retry-Count": "12"}, True)],
)  # fmt: skip
def test_a_request_is_a_retry_where_its_client_has_counted_one(headers: Any, is_retry: bool) -> None:
    assert _name_of(make_mocked_request("POST", CHAT, headers=headers), "{}").is_retry == is_retry


def test_requests_are_distinguished_by_their_key_their_path_and_all_that_they_say() -> None:
    def name(path: str, written: str, **headers: str) -> RequestName:
        return _name_of(make_mocked_request("POST", path, headers=headers), written)

    one = name(CHAT, '{"a": 1}')
    assert one == name(CHAT, '{"a": 1}')
    assert one.key == ""
    assert len({one.digest, name(CHAT, '{"a": 2}').digest, name("/v1/responses", '{"a": 1}').digest}) == 3
    assert name(CHAT, '{"a": 1}', **{"Idempotency-Key": "k"}) == replace(one, key="k")
    assert name(CHAT, '"\ud800"').digest != name(CHAT, '"\ud801"').digest, "half of a surrogate pair is text too"


@pytest.mark.parametrize(
    ("error", "status", "count"),
    [
        (BadRequest("no", status=409), 409, "agent_refused"),
        (web.HTTPNotFound(), 404, "agent_refused"),
        (web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2), 413, "agent_refused"),
        (ValueError("oh no"), 500, "agent_refused"),
        (ConnectionResetError(), 499, "agent_disconnects"),
    ],
)
def test_what_goes_wrong_in_a_request_is_a_response_and_a_defect_ends_the_sample(
    error: Exception, status: int, count: str
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    async def send() -> Any:
        agent = AgentSession(Policy(), FORMATS["hermes"])  # type: ignore[arg-type]
        guard: Any = application(agent).middlewares[0]
        sent = make_mocked_request("POST", CHAT, headers={"x-api-key": agent.secret})
        response = await guard(sent, handler)
        assert agent.counts == {"agent_requests": 1, count: 1}
        assert agent.broken.done() == isinstance(error, ValueError)
        if agent.broken.done():
            assert agent.broken.exception() is error
        return response.status

    assert asyncio.run(send()) == status


def test_sessions_at_once_have_addresses_of_their_own_which_end_with_them() -> None:
    async def play() -> None:
        policy = Policy()
        policy.going.clear()
        async with serving(Policy("7<|im_end|>")) as (_, other, client):
            async with serving(policy) as (agent, address, own):
                waiting = asyncio.create_task(own.post(address + CHAT, json=ASK))
                await until(lambda: policy.prompts)
                (running,) = agent._running
            assert agent.is_over
            assert running.cancelled()
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(f"{address}/v1/models")
            async with client.post(other + CHAT, json=ASK) as response:
                assert response.status == 200

    asyncio.run(play())


def test_a_retry_whose_settings_come_in_another_order_is_the_same_request() -> None:
    retry = {"x-stainless-retry-count": "1"}
    answers, _ = asked(Policy("1<|im_end|>"), ASK, (dict(reversed(ASK.items())), retry))
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0] == answers[1]
