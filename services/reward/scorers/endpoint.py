"""Requests scores from a server: one POST with retries and one deadline, over persistent connections.

What is sent, and the format of a reply, are in remote.py and llm_judge.py.

An attempt fails permanently (CannotJudge) if a retry would not help: most 4xx, a reply that is too long, a redirect. It
is retried after a failed or broken connection, and status 408, 425, 429 and 5xx, as long as retries and time are left;
after that the verdict is `crashed`, or `timed_out` if the time is used up. The key is never in a message or a log.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from areal_like.errors import OperationError, UserError
from areal_like.secret_values import MIN_CHARS, replaced
from services.reward.option_files import read_key
from services.reward.scorer_options import EndpointOptions
from services.reward.scorers.port import CannotJudge, TookTooLong

TRY_AGAIN = frozenset({408, 425, 429})
MAX_PAUSE_S = 5.0
MAX_CONNECTIONS = 8
KEEP_ALIVE_S = 30.0
SHOWN_CHARS = 160


class EndpointFailed(OperationError):
    """The server could not be reached, or failed, at every attempt; the request is retried by the service."""


class Endpoint:
    """Call `post` from one thread; the loop and its connections exist as long as the process."""

    def __init__(self, url: str, options: EndpointOptions, headers: Mapping[str, str], where: str) -> None:
        """Raises UserError if the key or the HTTP library is missing."""
        try:
            import httpx2 as httpx
        except ImportError as error:
            raise UserError(
                "the scorer requires the package httpx2", where=where, remedy="pip install httpx2"
            ) from error
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UserError(f"`{shown(url)}` is not a valid URL ({error})", where=where) from error
        self._httpx = httpx
        self._url, self._options = url, options
        self._shown_url = shown(url)
        self._headers = {**headers, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._secrets: tuple[tuple[str, str], ...] = ()
        if (key := read_key(options, where)) is not None:
            self._headers["Authorization"] = f"Bearer {key}"
            # A short key, such as `EMPTY` of a local server, could be a part of any message.
            self._secrets = ((key, "the key"),) if len(key) >= MIN_CHARS else ()
        self._runner: asyncio.Runner | None = None
        parts = urlsplit(url)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(2 * options.total_timeout_s),  # `post` ends a wait before this does
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),  # no proxy for this machine
            verify=parts.scheme == "https",  # reading the certificates is slow, and plain HTTP does not need them
        )

    def post(self, body: Any) -> bytes:
        """Send `body` as JSON and return the reply's bytes. Raises CannotJudge, TookTooLong, EndpointFailed."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            content = msgspec.json.encode(body)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise CannotJudge(f"the row cannot be sent as JSON ({error})") from error
        return self._runner.run(self._within_deadline(content))

    async def _within_deadline(self, content: bytes) -> bytes:
        total_s = self._options.total_timeout_s
        failures: list[str] = []
        try:
            async with asyncio.timeout(total_s):  # owner of the wait: the server
                return await self._attempts(content, time.monotonic() + total_s, failures)
        except TimeoutError:
            before = f"; the previous failure: {failures[-1]}" if failures else ""
            raise TookTooLong(f"{self._shown_url} did not reply within {total_s:g} s{before}") from None

    async def _attempts(self, content: bytes, give_up_s: float, failures: list[str]) -> bytes:
        options = self._options
        pause_s = options.backoff_s
        while True:
            retry_after_s = 0.0
            try:
                status, reply, retry_after_s = await self._attempt(content)
            except (self._httpx.RequestError, OSError) as error:
                failures.append(replaced(f"{type(error).__name__}: {error}", self._secrets)[:SHOWN_CHARS])
            else:
                if 200 <= status < 300:
                    return reply
                words = f"status {status}{_start_of(reply, self._secrets)}"
                if status < 500 and status not in TRY_AGAIN:
                    raise CannotJudge(f"{self._shown_url} refuses: {words}")
                failures.append(words)
            if len(failures) > options.retries:
                raise EndpointFailed(f"{self._shown_url} failed {len(failures)} times; last failure: {failures[-1]}")
            wait_s = max(min(pause_s, MAX_PAUSE_S) * random.uniform(0.5, 1.0), retry_after_s)
            if time.monotonic() + wait_s >= give_up_s:
                raise EndpointFailed(f"{self._shown_url} failed {len(failures)} times, and no time is left to retry; "
                                     f"last failure: {failures[-1]}")  # fmt: skip
            await asyncio.sleep(wait_s)
            pause_s *= 2

    async def _attempt(self, content: bytes) -> tuple[int, bytes, float]:
        """Make one attempt; returns status, reply, and the seconds of Retry-After."""
        max_bytes = self._options.max_reply_kb << 10
        async with self._client.stream("POST", self._url, content=content, headers=self._headers) as response:
            chunks = bytearray()
            async for chunk in response.aiter_raw():
                chunks += chunk
                if len(chunks) > max_bytes:
                    raise CannotJudge(f"{self._shown_url} replied with more than {self._options.max_reply_kb} KB")
            return response.status_code, bytes(chunks), _seconds(response.headers.get("Retry-After", ""))


def shown(url: str) -> str:
    """An address for messages: without query and fragment, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _start_of(reply: bytes, secrets: tuple[tuple[str, str], ...]) -> str:
    """The start of a reply, for messages. secrets: what a server may repeat of the request, as `replaced` has it."""
    text = replaced(" ".join(reply.decode(errors="replace").split()), secrets)[:SHOWN_CHARS]
    text = "".join(character if character.isprintable() else "?" for character in text)
    return f" ({text})" if text else ""


def _seconds(text: str) -> float:
    """Retry-After in seconds; dates are ignored."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
