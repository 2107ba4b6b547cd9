"""HTTP client of one SGLang server.

It has one method per endpoint, each with a deadline. How failures are handled is decided in engine.py and keeper.py.

`ServerGone` is raised if the server cannot be reached or the connection breaks, `ServerSilent` if it misses a deadline,
and `ServerRefused` if it responds with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec
from torch import Tensor

from areal_like.errors import EngineError
from areal_like.weights.process_group import GroupCall
from rollout.engine.sglang.answer import StreamEvent, parse_event

PauseMode = Literal["retract", "in_place", "abort"]
PROBE_TIMEOUT_S = 10.0
REST_POLL_S = 0.02
KEEPALIVE_S = 2.0
"""A connection that is idle for longer is not used again. It must be less than the server's limit (5 s, in
SGLANG_TIMEOUT_KEEP_ALIVE): a request on a connection that the server is closing fails."""
_DONE = b"[DONE]"


class ServerGone(EngineError):
    """The server cannot be reached, broke off, or missed a deadline."""


class ServerSilent(ServerGone):
    """A call had no response within its deadline. The front process may respond to other calls while the scheduler
    hangs."""


class ServerRefused(EngineError):
    """The server answered with an error."""

    def __init__(self, call: str, status: int, text: str) -> None:
        self.call, self.status, self.text = call, status, text
        super().__init__(f"{call} was refused with status {status}: {text[:400]}")


class SGLangClient:
    """One server's endpoints. Create and close it on the event loop."""

    def __init__(self, url: str, *, control_timeout_s: float, load_timeout_s: float, key: str | None = None) -> None:
        """`key`: sent with every request; None: the server requires none."""
        self.url = url.rstrip("/")
        self._control_timeout_s, self._load_timeout_s = control_timeout_s, load_timeout_s
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

    # ------------------------------------------------------------ generating

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[StreamEvent, None]:
        """The events of one /generate request with `stream` set. It has no deadline: a paused server sends nothing, and
        a dead one is detected by the keeper, which then closes this client.
        """
        try:
            async with self._session.post(f"{self.url}/generate", data=_encode(body), headers=_JSON) as response:
                if response.status != 200:
                    raise ServerRefused("/generate", response.status, await response.text(errors="replace"))
                self._streams.add(response.content)
                try:
                    async for data in _events(response.content):
                        if data == _DONE:
                            return
                        yield parse_event(data)
                finally:
                    self._streams.discard(response.content)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ServerGone(f"the stream ended early: {type(error).__name__}: {error}") from error
        raise ServerGone("the stream ended early")

    async def abort(self, request_id: str) -> None:
        """End one request; its stream receives the tokens so far, with finish reason `abort`."""
        await self._post("/abort_request", {"rid": request_id})

    async def abort_all(self) -> None:
        """End every request of the server's scheduler; each stream receives its tokens so far and its version spans."""
        await self._post("/abort_request", {"abort_all": True})

    # ------------------------------------------------------------ control

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary. `retract`: requests go back to the queue; `in_place`: they keep their cache."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._post("/continue_generation", {})

    async def load(self, folder: str, version: int, *, flush_cache: bool) -> None:
        """Replace the weights by those of a Hugging Face folder on the server's disk."""
        body = {
            "model_path": folder, "load_format": "auto", "weight_version": str(version),
            "flush_cache": flush_cache, "abort_all_requests": False,
        }  # fmt: skip
        answer = await self._post("/update_weights_from_disk", body, timeout_s=self._load_timeout_s)
        if not answer.get("success", False):
            raise ServerRefused("/update_weights_from_disk", 200, str(answer.get("message", answer)))

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        """Release GPU memory (needs the memory saver). `tags`: `weights`, `kv_cache`; empty: both. No answer may be
        requested meanwhile. Raises ServerRefused, also if the server does not become idle.
        """
        await self._rest()
        await self._post("/release_memory_occupation", {"tags": list(tags)} if tags else {})

    async def _rest(self) -> None:
        """Return once the scheduler is idle. An answer's last token arrives before the scheduler has removed the batch,
        and until then a request to release memory makes it crash; a flush is only refused.
        """
        deadline_s = time.monotonic() + self._control_timeout_s
        while True:
            try:
                await self._post("/flush_cache", {})
                return
            except ServerRefused:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(REST_POLL_S)

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        """Allocate the memory again."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    # ------------------------------------------------------------ a process group

    async def join_group(self, call: GroupCall, rank: int) -> None:
        """Join the group as `rank`; nothing is generated until that is done."""
        body = {
            "master_address": call.host.strip("[]"), "master_port": call.port, "rank_offset": rank,
            "world_size": call.size, "group_name": call.group, "backend": call.backend,
        }  # fmt: skip
        await self._post("/init_weights_update_group", body, timeout_s=call.deadline_s)

    async def leave_group(self, name: str) -> None:
        """Leave the group. Raises ServerRefused if the server is not in it."""
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def begin_update(self) -> None:
        """Announce buckets. The server must be paused."""
        await self._post("/begin_weight_update", {}, timeout_s=self._load_timeout_s)

    async def receive_bucket(
        self, tensors: Mapping[str, Tensor], call: GroupCall, *, version: int | None, flush_cache: bool
    ) -> None:
        """Receive one broadcast, the concatenation of these tensors (dtypes and shapes matter), and load them.

        `version`: version of the weights from now on; None: more buckets follow.
        """
        body = {
            "names": list(tensors), "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()], "group_name": call.group,
            "load_format": "flattened_bucket", "flush_cache": flush_cache, "abort_all_requests": False,
            **({} if version is None else {"weight_version": str(version)}),
        }  # fmt: skip
        await self._post("/update_weights_from_distributed", body, timeout_s=call.deadline_s)

    async def end_update(self) -> None:
        """Finish the update after the last bucket."""
        await self._post("/end_weight_update", {}, timeout_s=self._load_timeout_s)

    # ------------------------------------------------------------ asking

    async def probe(self) -> None:
        """Return once the server's front process responds. Raises ServerGone. (Not /health: that takes a second.)"""
        await self._get("/model_info", timeout_s=min(PROBE_TIMEOUT_S, self._control_timeout_s / 2))

    async def model_info(self) -> dict[str, Any]:
        """Model path, version of the weights, and so on."""
        return await self._get("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments, version and state."""
        return await self._get("/server_info")

    async def checksums(self) -> dict[str, Any]:
        """A checksum per tensor, under SGLang's own names."""
        return await self._post("/weights_checker", {"action": "checksum"}, timeout_s=self._load_timeout_s)

    # ------------------------------------------------------------ inside

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        return await self._call("POST", path, _encode(body), timeout_s or self._control_timeout_s)

    async def _get(self, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._call("GET", path, None, timeout_s or self._control_timeout_s)

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


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The text after `data:` in each event. Read in blocks, since an event may be longer than any line limit."""
    rest = b""
    async for block in content.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            yield event.strip().removeprefix(b"data:").strip()


_JSON = {"Content-Type": "application/json"}


def _encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)
