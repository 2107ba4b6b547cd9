"""Requests to one address of a server that others run: POST with retries and one deadline, over persistent
connections.

An attempt fails permanently (RequestRefused) if a retry would not help: most 4xx, a reply that is too long, a redirect.
It is retried after a failed or broken connection, status 408, 425, 429 and 5xx, and a reply for which `is_failure` is
true, as long as retries and time are left; after that RequestFailed is raised, or RequestTimedOut if the time is used
up. The key is never in a message or a log.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from areal_like.errors import UserError
from areal_like.external.errors import ExternalStop, RequestFailed, RequestRefused, RequestTimedOut
from areal_like.external.key import key_place, read_key
from areal_like.external.settings import EndpointOptions
from areal_like.secret_values import MIN_CHARS, replaced

TRY_AGAIN = frozenset({408, 425, 429})
KEY_REFUSED = frozenset({401, 403})
MAX_PAUSE_S = 5.0
MAX_CONNECTIONS = 8
KEEP_ALIVE_S = 30.0
SHOWN_CHARS = 160


class HttpClient:
    """Call `post` on one event loop; its connections exist as long as the process."""

    def __init__(
        self, url: str, options: EndpointOptions, headers: Mapping[str, str], where: str, *,
        max_connections: int = MAX_CONNECTIONS, ends_without_key: bool = False,
        is_failure: Callable[[bytes], bool] = lambda reply: False,
    ) -> None:  # fmt: skip
        """Args:
            url: full address.
            options: timeouts, retries and the place of the key.
            headers: further headers.
            where: the setting, for errors.
            max_connections: number of requests at once.
            ends_without_key: a key that the server refuses (401, 403) raises ExternalStop instead of RequestRefused.
            is_failure: whether a reply with status 2xx is a failed attempt.

        Raises:
            UserError: the key or the HTTP library is missing.
        """
        try:
            import httpx2 as httpx
        except ImportError as error:
            raise UserError(
                "the package `httpx2` is not installed", where=where, remedy="pip install httpx2"
            ) from error
        self.shown_url = shown(url)
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UserError(f"`{self.shown_url}` is not a valid URL ({error})", where=where) from error
        self._httpx, self._where = httpx, where
        self._url, self._options, self._ends_without_key = url, options, ends_without_key
        self._is_failure = is_failure
        self._headers = {**headers, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        self.secrets: tuple[tuple[str, str], ...] = ()
        """(value, name) of what a reply must not show, as `replaced` takes it."""
        if (key := read_key(options, where)) is not None:
            self._headers["Authorization"] = f"Bearer {key}"
            # A short key, such as `EMPTY` of a local server, could be a part of any message.
            self.secrets = ((key, "the key"),) if len(key) >= MIN_CHARS else ()
        self.num_failures = 0
        """Number of failed attempts."""
        parts = urlsplit(url)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(2 * options.total_timeout_s),  # `post` ends a wait before this does
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),  # no proxy for this machine
            verify=parts.scheme == "https",  # reading the certificates is slow, and plain HTTP does not need them
        )

    async def post(self, content: bytes) -> bytes:
        """Send JSON and return the reply's bytes. Raises ExternalError, ExternalStop."""
        total_s = self._options.total_timeout_s
        failures: list[str] = []
        try:
            async with asyncio.timeout(total_s):  # owner of the wait: the server
                return await self._attempts(content, time.monotonic() + total_s, failures)
        except TimeoutError:
            before = f"; the previous failure: {failures[-1]}" if failures else ""
            raise RequestTimedOut(f"{self.shown_url} did not reply within {total_s:g} s{before}") from None
        finally:
            self.num_failures += len(failures)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempts(self, content: bytes, give_up_s: float, failures: list[str]) -> bytes:
        options = self._options
        pause_s = options.backoff_s
        while True:
            retry_after_s = 0.0
            try:
                async with asyncio.timeout(options.attempt_timeout_s):
                    status, reply, retry_after_s = await self._attempt(content)
            except TimeoutError:
                failures.append(f"no reply within {options.attempt_timeout_s:g} s")
            except (self._httpx.RequestError, OSError) as error:
                failures.append(replaced(f"{type(error).__name__}: {error}", self.secrets)[:SHOWN_CHARS])
            else:
                is_answer = 200 <= status < 300
                if is_answer and not self._is_failure(reply):
                    return reply
                words = f"status {status}{_start_of(reply, self.secrets)}"
                if status in KEY_REFUSED and self._ends_without_key:
                    what = f"{self.shown_url} rejected the key ({key_place(options)}): {words}"
                    raise ExternalStop(what, where=self._where, remedy="correct the key, and resume the run")
                if status < 500 and status not in TRY_AGAIN and not is_answer:
                    raise RequestRefused(f"{self.shown_url} rejected the request: {words}")
                failures.append(words)
            if len(failures) > options.retries:
                raise RequestFailed(f"{self.shown_url} failed {len(failures)} times; last failure: {failures[-1]}")
            wait_s = max(min(pause_s, MAX_PAUSE_S) * random.uniform(0.5, 1.0), retry_after_s)
            if time.monotonic() + wait_s >= give_up_s:
                raise RequestFailed(f"{self.shown_url} failed {len(failures)} times, and no time is left to retry; "
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
                    limit = f"max_reply_kb ({self._options.max_reply_kb})"
                    raise RequestRefused(f"the reply of {self.shown_url} is larger than {limit}; increase max_reply_kb")
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
