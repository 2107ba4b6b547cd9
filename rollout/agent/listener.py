"""The HTTP server of an agent in training, and the routes of a policy that is served.

It checks keys and sizes, and detects clients that disconnect. Answers come from session.py or endpoint.py, their format
from the dialects.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from aiohttp import web

from areal_like.errors import UserError
from rollout.agent.anthropic_messages import AnthropicMessages
from rollout.agent.chat_completions import ChatCompletions
from rollout.agent.dialect import AgentRequest, BadRequest, Dialect, Reply, no_such_model
from rollout.agent.responses import Responses
from rollout.agent.session import AgentSession, RequestName
from rollout.agent.store import Message
from rollout.agent.streaming import BEGINS_HEADER, CONVERSATION_HEADER, OnConversation, OnPart, StreamedResponse
from rollout.agent.token_requests import TokenRequests

MAX_REQUEST_BYTES = 32 << 20
BACKLOG = 128
OPENAI, ANTHROPIC = ChatCompletions(), AnthropicMessages()
DIALECTS: tuple[Dialect, ...] = (OPENAI, Responses(), ANTHROPIC, TokenRequests())
POLICY = "policy"
"""Name of the model for an agent in training."""
WRONG_KEY = "the API key is not valid for this agent; use {variable}"
BUSY = 429
"""Status of the one error after which a client may send the same request again."""

_QUIET = logging.getLogger(f"{__name__}.http")
"""Logger of the HTTP server, which logs a traceback for a request that is not HTTP (the client gets status 400). Errors
in a handler are reported by the sample."""
_QUIET.setLevel(logging.CRITICAL + 1)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answers(Protocol):
    """Interface of objects that answer requests: `AgentSession`, `Endpoint`."""

    secret: str
    """API key of the clients; empty: none is required, and requests of web pages are refused."""
    counts: Counter[str]

    def answering(
        self, request: AgentRequest, name: RequestName, on_part: OnPart | None = None,
        on_conversation: OnConversation | None = None,
    ) -> AbstractAsyncContextManager[Reply]:  # fmt: skip
        """See `AgentSession.answering`. `on_part` is called as the answer grows, if that is possible, and
        `on_conversation` before, where conversations have ids."""
        ...

    def conversation(self, index: int) -> list[Message]:
        """See `AgentSession.conversation`."""
        ...

    def num_tokens(self, request: AgentRequest) -> int:
        """See `AgentSession.num_tokens`."""
        ...

    @property
    def max_context(self) -> int:
        """Longest prompt plus answer, in tokens."""
        ...

    def fail(self, error: BaseException) -> None:
        """Report a request that could not be handled because of an internal error."""
        ...


@asynccontextmanager
async def listening(session: AgentSession) -> AsyncIterator[str]:
    """Serve a session until the block ends; yields its address, `http://127.0.0.1:PORT`."""
    made = application(session)
    _add_training(made, session)
    runner = runner_of(made)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await session.close()
        await runner.cleanup()


def bound_socket(host: str, port: int, *, host_key: str, port_key: str, remedy: str) -> socket.socket:
    """A socket that listens at an address, before requests can be answered. `host_key`, `port_key`: where the address
    was given, for messages. `remedy`: for a port in use. Raises UserError."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as error:
        raise UserError(f"the address of {host} cannot be resolved ({error})", where=host_key) from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(BACKLOG)  # early requests wait
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} on {host} is in use", where=port_key, remedy=remedy) from error
        where = f"{host_key}, {port_key}"
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror})", where=where) from error
    return made


def runner_of(made: web.Application) -> web.AppRunner:
    """A server of the application without an access log."""
    return web.AppRunner(
        made, access_log=None, logger=_QUIET, shutdown_timeout=1.0,
        handler_cancellation=True,  # detects clients that disconnect, whose answers nobody waits for
    )  # fmt: skip


def application(
    session: Answers, *, models: Sequence[str] = (POLICY,), wrong_key: str = WRONG_KEY
) -> web.Application:  # fmt: skip
    """The routes of all dialects. `models`: names of the models. `wrong_key`: error message for a client with another
    key; `{variable}` is the variable from which its SDK reads the key."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        session.counts["agent_requests"] += 1
        try:
            _check_key(request, session.secret, wrong_key)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            refusal = BadRequest(
                f"the request is larger than {MAX_REQUEST_BYTES >> 20} MiB", status=413, code="too_large"
            )
        except web.HTTPException as error:
            refusal = BadRequest(f"{request.method} {request.path}: {error.reason}", status=error.status)
        except BadRequest as error:
            refusal = error
        except (
            ConnectionError,
            asyncio.CancelledError,
        ) as error:  # the client has disconnected; it may repeat the request
            session.counts["agent_disconnects"] += 1
            if isinstance(error, asyncio.CancelledError):
                raise
            return web.Response(status=499)  # no client reads it
        except Exception as error:
            session.fail(error)
            refusal = BadRequest("the request could not be handled", status=500, code="internal_error")
        session.counts["agent_refused"] += 1
        # Clients retry some statuses automatically, which does not help here.
        headers = {} if refusal.status == BUSY else {"x-should-retry": "false"}
        return web.json_response(_dialect_of(request).error(refusal), status=refusal.status, headers=headers)

    def answers(dialect: Dialect) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            sent, written = await read_json(request)
            asked = dialect.read(sent, session.conversation)
            asked = replace(asked, settings=asked.settings or sent)
            name = _name_of(request, written)
            if asked.is_streamed:
                return await _streamed(session, request, asked, name, dialect)
            async with session.answering(asked, name) as reply:
                body, headers = dialect.answer(asked, reply), {"Cache-Control": "no-cache"}
                if reply.conversation:
                    body["conversation_id"] = headers[CONVERSATION_HEADER] = reply.conversation
                response = web.json_response(body, headers=headers)
                await response.prepare(request)
                await response.write_eof()
            return response

        return handler

    async def all_models(_: web.Request) -> web.StreamResponse:
        listed = [_model(name, session.max_context) for name in models]
        return web.json_response({"object": "list", "data": listed, "has_more": False})

    async def one_model(request: web.Request) -> web.StreamResponse:
        if (name := request.match_info["name"]) not in models:
            raise no_such_model(name, models)
        return web.json_response(_model(name, session.max_context))

    async def count(request: web.Request) -> web.StreamResponse:
        body, _ = await read_json(request)
        asked = ANTHROPIC.read(body, session.conversation)
        return web.json_response({"input_tokens": session.num_tokens(asked)})

    made = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[guard])
    for dialect in DIALECTS:
        made.router.add_post(dialect.path, answers(dialect))
    made.router.add_post(f"{ANTHROPIC.path}/count_tokens", count)
    made.router.add_get("/v1/models", all_models)
    made.router.add_get("/v1/models/{name:.+}", one_model)
    return made


async def _streamed(
    session: Answers, request: web.Request, asked: AgentRequest, name: RequestName, dialect: Dialect
) -> web.StreamResponse:
    """Stream the answer as events. Raises BadRequest if the request is refused before the response begins."""
    sent = StreamedResponse(request, dialect.stream(asked))
    try:
        async with sent.waiting(), session.answering(asked, name, sent.part, sent.belongs_to) as reply:
            await sent.end(reply)
    except (BadRequest, ConnectionError) as error:
        if sent.response is None or not isinstance(error, BadRequest):
            raise
        session.counts["agent_refused"] += 1
        await sent.fail(error)
    except Exception as error:
        if sent.response is None:
            raise
        session.fail(error)
        session.counts["agent_refused"] += 1
        await sent.fail(BadRequest("the request could not be handled", status=500, code="internal_error"))
    assert sent.response is not None
    return sent.response


def _add_training(made: web.Application, session: AgentSession) -> None:
    """Add the routes that only an agent in training has."""

    async def reward(request: web.Request) -> web.StreamResponse:
        body, _ = await read_json(request)
        session.report(body)
        return web.json_response({})

    async def answer(request: web.Request) -> web.StreamResponse:
        body, _ = await read_json(request)
        session.submit_answer(body)
        return web.json_response({})

    async def row(_: web.Request) -> web.StreamResponse:
        return web.json_response(session.row)

    made.router.add_get("/rl/row", row)
    made.router.add_post("/rl/reward", reward)
    made.router.add_post("/rl/answer", answer)


def _model(name: str, max_context: int) -> dict[str, Any]:
    """Description of the model in OpenAI's form, with vLLM's context length, and in the last line Anthropic's
    fields.
    """
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "areal_like", "max_model_len": max_context,
        "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z",
    }  # fmt: skip


def _dialect_of(request: web.Request) -> Dialect:
    """The dialect in whose form errors are sent to this client."""
    is_anthropic = request.path.startswith(ANTHROPIC.path) or "anthropic-version" in request.headers
    return ANTHROPIC if is_anthropic else OPENAI


def _check_key(request: web.Request, secret: str, wrong_key: str) -> None:
    if not secret:
        if "Origin" in request.headers:  # any page in a browser of this machine could send requests to loopback
            raise BadRequest("requests of web pages need a key (key_variable)", status=403, code="key_required")
        return
    _, _, token = request.headers.get("Authorization", "").partition(" ")  # the scheme may be written in any case
    given = (request.headers.get("x-api-key", ""), token)
    if not any(hmac.compare_digest(one.encode(errors="replace"), secret.encode()) for one in given):
        variable = "ANTHROPIC_API_KEY" if _dialect_of(request) is ANTHROPIC else "OPENAI_API_KEY"
        raise BadRequest(wrong_key.format(variable=variable), status=401, code="invalid_api_key")


async def read_json(request: web.Request) -> tuple[Mapping[str, Any], str]:
    """The body, and its canonical JSON text."""
    try:
        sent = await request.read()
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request cannot be read: {' '.join(str(error).split())}") from error
    try:
        body = json.loads(sent)
        written = json.dumps(body, sort_keys=True)  # parsed JSON may be nested too deep to be written
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise BadRequest("the request is not a JSON object")
    return body, written


def _name_of(request: web.Request, written: str) -> RequestName:
    """Identify a request. OpenAI's and Anthropic's clients count their retries; an equal request with a count of 0 is a
    new one. Raises BadRequest."""
    begins = request.headers.get(BEGINS_HEADER, "false").lower()
    if begins not in ("true", "false"):
        raise BadRequest(f"the header {BEGINS_HEADER} must be true or false")
    return RequestName(
        key=request.headers.get("Idempotency-Key", ""),
        digest=hashlib.blake2b(f"{request.path} {written}".encode(errors="surrogatepass"), digest_size=16).digest(),
        is_retry=request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        conversation=request.headers.get(CONVERSATION_HEADER, ""),
        begins=begins == "true",
    )
