"""Connections of the client of an SGLang server."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from rollout.engine.server import http as module
from rollout.engine.server.http import KEEPALIVE_S, ServerGone, ServerRefused
from rollout.engine.sglang.client import SGLangClient

SERVER_LIMIT_S = 5.0
"""Default of SGLANG_TIMEOUT_KEEP_ALIVE: an idle connection is closed then."""


async def ports_of(pauses_s: list[float]) -> list[int]:
    """The client's port in each of several requests, with these pauses between them."""
    ports: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    client = SGLangClient(f"http://{host}:{port}", control_timeout_s=30.0, load_timeout_s=30.0)
    try:
        for pause_s in (*pauses_s, 0.0):
            await client.pause("abort")
            await asyncio.sleep(pause_s)
    finally:
        await client.close()
        await runner.cleanup()
    return ports


def test_a_connection_that_the_server_may_be_closing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEEPALIVE_S < SERVER_LIMIT_S
    monkeypatch.setattr(module, "KEEPALIVE_S", 3600.0)
    assert len(set(asyncio.run(ports_of([0.2])))) == 1
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.05)
    assert len(set(asyncio.run(ports_of([0.2])))) == 2


@pytest.mark.parametrize(("status", "kind"), [(400, ServerRefused), (500, ServerGone), (503, ServerGone)])
def test_a_generation_request_is_rejected_by_a_client_error_and_repeated_after_a_server_error(
    status: int, kind: type[Exception]
) -> None:
    """The front process answers 500 while its engine process dies, before the keeper notices."""

    async def body() -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, text="EngineDeadError")

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        client = SGLangClient(f"http://{host}:{port}", control_timeout_s=30.0, load_timeout_s=30.0)
        try:
            with pytest.raises(kind, match=f"status {status}: EngineDeadError"):
                async for _ in client.stream({}):
                    pass
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(body())
