"""The endpoints of one SGLang server.

It has one method per endpoint, each with a deadline; failures are described in server/http.py. How they are handled is
decided in engine.py and keeper.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from torch import Tensor

from areal_like.weights.process_group import GroupCall
from rollout.engine.server.answer import StreamEvent, parse_event
from rollout.engine.server.http import HttpCalls, ServerRefused

PauseMode = Literal["retract", "in_place", "abort"]
PROBE_TIMEOUT_S = 10.0
REST_POLL_S = 0.02


class SGLangClient(HttpCalls):
    """One server's endpoints. Create and close it on the event loop."""

    # ------------------------------------------------------------ generating

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[StreamEvent, None]:
        """The events of one /generate request with `stream` set. It has no deadline."""
        async with contextlib.aclosing(self._events("/generate", body)) as events:
            async for data in events:
                yield parse_event(data)

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
        answer = await self._post("/update_weights_from_disk", body, timeout_s=self.load_timeout_s)
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
        deadline_s = time.monotonic() + self.control_timeout_s
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
        await self._post("/begin_weight_update", {}, timeout_s=self.load_timeout_s)

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
        await self._post("/end_weight_update", {}, timeout_s=self.load_timeout_s)

    # ------------------------------------------------------------ asking

    async def probe(self) -> None:
        """Return once the server's front process responds. Raises ServerGone. (Not /health: that takes a second.)"""
        await self._get("/model_info", timeout_s=min(PROBE_TIMEOUT_S, self.control_timeout_s / 2))

    async def model_info(self) -> dict[str, Any]:
        """Model path, version of the weights, and so on."""
        return await self._get("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments, version and state."""
        return await self._get("/server_info")

    async def checksums(self) -> dict[str, Any]:
        """A checksum per tensor, under SGLang's own names."""
        return await self._post("/weights_checker", {"action": "checksum"}, timeout_s=self.load_timeout_s)
