"""HTTP to one server: calls with deadlines, streams of events, and the three ways in which they fail.

`ServerGone` is raised if the server cannot be reached or the connection breaks, `ServerSilent` if it misses a deadline,
and `ServerRefused` if it responds with an error. The endpoints are in the clients of the single engines.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

import aiohttp
import msgspec

from areal_like.errors import EngineError
from rollout.engine.server.answer import StreamEvent

KEEPALIVE_S = 2.0
"""A connection that is idle for longer is not used again. It must be less than the server's limit (5 s): a request on a
connection that the server is closing fails."""
DONE = b"[DONE]"
_JSON = {"Content-Type": "application/json"}


class ServerGone(EngineError):
    """The server cannot be reached, broke off, or missed a deadline."""


class ServerSilent(ServerGone):
    """A call had no response within its deadline. The front process may respond to other calls while the scheduler
    hangs."""


class ServerRefused(EngineError):
    """The server answered with an error."""

    def __init__(self, call: str, status: int, text: str) -> None:
        self.call, self.status, self.text = call, status, text
        super().__init__(f"{call} was rejected with status {status}: {text[:400]}")


class ServerClient(Protocol):
    """The calls that keeper and attempts make, whatever the server."""

    @property
    def url(self) -> str: ...

    def stream(self, body: dict[str, Any]) -> AsyncGenerator[StreamEvent, None]:
        """The events of one request, which ends with its last event. Raises ServerGone, ServerRefused."""
        ...

    async def abort(self, request_id: str) -> None:
        """End one request; its stream receives the tokens so far, with finish reason `abort`."""
        ...

    async def abort_all(self) -> None:
        """End every request; each stream receives its tokens so far and its version spans."""
        ...

    async def probe(self) -> None:
        """Return once the server's front process responds. Raises ServerGone."""
        ...

    async def close(self) -> None:
        """Close all connections; running streams end with ServerGone."""
        ...


class HttpCalls:
    """Calls and streams of one server. Create and close it on the event loop."""

    def __init__(self, url: str, *, control_timeout_s: float, load_timeout_s: float, key: str | None = None) -> None:
        """`key`: sent with every request; None: the server requires none."""
        self.url = url.rstrip("/")
        self.control_timeout_s, self.load_timeout_s = control_timeout_s, load_timeout_s
        self._streams: set[aiohttp.StreamReader] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=control_timeout_s),
            trust_env=False,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )

    async def close(self) -> None:
        """Close all connections; running streams end with ServerGone."""
        for content in self._streams:  # closing the session does not wake their readers, which would wait indefinitely
            content.set_exception(aiohttp.ClientConnectionError("the connection was closed"))
        await self._session.close()

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of the events that a POST is answered with, up to `[DONE]`. It has no deadline: a paused server
        sends nothing, and a dead one is detected by the keeper, which then closes this client. Raises ServerRefused
        if the request is at fault, ServerGone if the server is."""
        try:
            async with self._session.post(self.url + path, data=_encode(body), headers=_JSON) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    if response.status >= 500:  # its engine process is dying, which the keeper may not have noticed yet
                        raise ServerGone(f"{path} was answered with status {response.status}: {text[:400]}")
                    raise ServerRefused(path, response.status, text)
                self._streams.add(response.content)
                try:
                    async for data in _split(response.content):
                        if data == DONE:
                            return
                        yield data
                finally:
                    self._streams.discard(response.content)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ServerGone(f"the stream was truncated: {type(error).__name__}: {error}") from error
        raise ServerGone("the stream was truncated")

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        return await self._call("POST", path, _encode(body), timeout_s or self.control_timeout_s)

    async def _get(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._call("GET", path, None, timeout_s or self.control_timeout_s)

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=_JSON if body else None, timeout=timeout
            ) as response:
                data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError, RuntimeError) as error:
            if isinstance(error, TimeoutError):
                raise ServerSilent(f"{path}: no reply within {timeout_s:g} s") from error
            raise ServerGone(f"{path}: {error}") from error
        if response.status != 200:
            raise ServerRefused(path, response.status, data.decode(errors="replace"))
        try:
            answer = msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError:
            answer = {"message": data.decode(errors="replace")}
        return answer if isinstance(answer, dict) else {"answer": answer}


async def _split(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The text after `data:` in each event. Read in blocks, since an event may be longer than any line limit."""
    rest = b""
    async for block in content.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            yield event.strip().removeprefix(b"data:").strip()


def _encode(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body)
