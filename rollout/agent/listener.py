"""The address of one agent: HTTP on the loopback interface, for one session and its key.

Owns: routes, the key, limits of size, how retries are recognised. Refuses: what an answer is (session.py), its form
(chat_completions.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollout.agent.chat_completions import BadRequest, answer_body, answer_events, read_request
from rollout.agent.session import AgentSession

MAX_REQUEST_BYTES = 32 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(session: AgentSession) -> AsyncIterator[str]:
    """Serve a session until the block ends; its address, as `http://127.0.0.1:PORT`."""
    runner = web.AppRunner(application(session), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await session.close()
        await runner.cleanup()


def application(session: AgentSession) -> web.Application:
    """The routes of a session."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        session.counts["agent_requests"] += 1
        try:
            _check_key(request, session.secret)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            refusal = BadRequest(f"a request has at most {MAX_REQUEST_BYTES >> 20} MiB", status=413, code="too_large")
        except web.HTTPException as error:
            refusal = BadRequest(f"{request.method} {request.path}: {error.reason}", status=error.status)
        except BadRequest as error:
            refusal = error
        session.counts["agent_refused"] += 1
        return web.json_response(refusal.body, status=refusal.status)

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        asked = read_request(body)
        key, is_repeated = _name_of(request, body)
        reply = await session.reply(asked, key=key, is_repeated=is_repeated)
        if not asked.is_streamed:
            return web.json_response(answer_body(asked, reply))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write("".join(f"data: {event}\n\n" for event in answer_events(asked, reply)).encode())
        await response.write_eof()
        return response

    async def models(_: web.Request) -> web.StreamResponse:
        one = {"id": "policy", "object": "model", "created": 0, "owned_by": "areal_like"}
        return web.json_response({"object": "list", "data": [one]})

    async def reward(request: web.Request) -> web.StreamResponse:
        session.report(await _json(request))
        return web.json_response({})

    async def row(_: web.Request) -> web.StreamResponse:
        return web.json_response(session.row)

    made = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[guard])
    made.router.add_post("/v1/chat/completions", completions)
    made.router.add_get("/v1/models", models)
    made.router.add_get("/rl/row", row)
    made.router.add_post("/rl/reward", reward)
    return made


def _check_key(request: web.Request, secret: str) -> None:
    given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(errors="replace"), secret.encode()):
        raise BadRequest("this is not the key of this agent: use OPENAI_API_KEY", status=401, code="invalid_api_key")


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not JSON: {error}") from error


def _name_of(request: web.Request, body: Any) -> tuple[str, bool]:
    """What names a request, and whether it may have been sent before. OpenAI's and Anthropic's clients count their
    retries; an equal request with a count of 0 is one more."""
    if key := request.headers.get("Idempotency-Key"):
        return f"key {key}", True
    digest = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(errors="surrogatepass"), digest_size=16)
    return digest.hexdigest(), request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
