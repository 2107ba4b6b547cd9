"""The SGLang engine: implements the Engine protocol over one server that is launched here or attached to.

It contains the start, the exchange of weights in each of the three modes, transfers through a process group, and
devices that are shared in turns. What it shares with vLLM's is in rollout/engine/server/engine.py, HTTP in client.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Unpack

import msgspec
from torch import Tensor

from areal_like.device_names import names_cpu
from areal_like.errors import EngineError, TransferBroken, WeightError
from areal_like.weights.process_group import GroupCall
from rollout.config import EngineSettings, Interruption
from rollout.engine.loading import DTYPES
from rollout.engine.port import EngineCapabilities, LoadReport
from rollout.engine.server.engine import Served, ServerEngine
from rollout.engine.server.http import ServerGone, ServerRefused
from rollout.engine.server.kind import ModelFolder
from rollout.engine.server.staging import StagedVersion
from rollout.engine.sglang.arguments import plan_launch
from rollout.engine.sglang.attach import check_attached, read_key
from rollout.engine.sglang.by_group import RANKS, ServerInGroup
from rollout.engine.sglang.client import PauseMode, SGLangClient
from rollout.engine.sglang.layout import FAMILIES, check_experts, check_family, compare, experts_shape, server_checksums
from rollout.engine.sglang.servers import SGLangServers
from rollout.engine.sglang.sleep import Sleeper, start_sleeper
from rollout.engine.sglang.turns import DeviceLease

log = logging.getLogger(__name__)

Bring = Callable[[SGLangClient, bool], Awaitable[StagedVersion]]
"""Loads a version into a paused server, and flushes its prefix cache or keeps it."""


async def _from_folder(staged: StagedVersion, client: SGLangClient, flush_cache: bool) -> StagedVersion:
    await client.load(str(staged.folder), staged.version, flush_cache=flush_cache)
    return staged


class SGLangEngine(ServerEngine[SGLangClient, StagedVersion]):
    """One SGLang server behind the Engine port; the methods are specified in rollout/engine/port.py."""

    title = "SGLang"

    def __init__(
        self, model_dir: Path, settings: EngineSettings, *, attach: str | None = None, starts_empty: bool = False,
        **parts: Unpack[Served],
    ) -> None:  # fmt: skip
        """`attach`: a server's address. `starts_empty`: the device is shared in turns; the server starts with the first
        version.
        """
        summing = self._checksums if settings.sglang.checksums else None
        super().__init__(model_dir, settings, settings.sglang, summing, **parts)
        self._starts_empty, self._attach = starts_empty, attach
        self._is_head_tied = False
        self._turns: DeviceLease | None = None
        self._group: ServerInGroup | None = None
        self._sleeper: Sleeper | None = None

    # ------------------------------------------------------------------ life

    @property
    def capabilities(self) -> EngineCapabilities:
        """As of every engine with servers; also the ranks that join a process group."""
        return msgspec.structs.replace(
            super().capabilities,
            per_request_seed=self._settings.sglang.deterministic,
            group_ranks=RANKS if self._group is not None else 0,
        )

    async def start(self) -> None:
        """Check environment and arguments, and start the server. Raises UserError, EngineError."""
        config = await self._read_config()
        self._is_head_tied = bool(config.get_text_config().tie_word_embeddings)
        if self._settings.sglang.checksums:
            check_family(config, "rollout.engine.sglang.checksums")
        check_experts(config)
        launch = key = None
        if not self._attach:
            launch = await asyncio.to_thread(
                plan_launch, self._settings, dtype=self._dtype, context=self._context, num_threads=self._num_threads,
                interruption=self._interruption, in_turns=self._starts_empty,
            )  # fmt: skip
        else:
            key = read_key(self._settings.sglang)
            await check_attached(self._attach, self._settings, self._interruption, self._model_dir, self._context, key)
        experts = experts_shape(config) if self._settings.sglang.routed_experts else None
        kind = SGLangServers(self._settings.sglang, launch, reports_experts=experts is not None)
        keeper, attempts = self._make_parts(kind, config, url=self._attach, key=key, experts_shape=experts)
        num_gpus = self._settings.sglang.tp_size
        is_cpu = names_cpu(self._settings.device)
        self._turns = DeviceLease(keeper, attempts, is_cpu=is_cpu, num_gpus=num_gpus)
        if self._starts_empty:
            attempts.gate.clear()
            return
        await self._turns.take()
        if launch is not None and is_cpu and num_gpus == 1 and config.model_type in FAMILIES:
            folder = keeper.scratch / "versions"
            self._group = ServerInGroup(self._stager, self._thread, self._checksums, folder)
        self._sleeper = start_sleeper(self._settings.sglang, keeper, attempts, self._load_lock)

    async def close(self) -> None:
        """End the server and everything that waits for it. Safe to call twice."""
        if self._sleeper is not None:
            self._sleeper.close()
        if self._group is not None:
            self._group.close()
        await super().close()

    def counters(self) -> dict[str, float]:
        """As of every engine with servers; also sleeps."""
        return {**super().counters(), "sleeps": float(self._sleeper.num_sleeps if self._sleeper else 0)}

    # ------------------------------------------------------------------ versions

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """See the port. The server is also paused while it joins a new group. If it fails in the group, it is
        replaced.
        """
        self._started()
        return await self._in_order(self._load_from_group(call, interruption))

    async def release_memory(self) -> int:
        """See the port. Waits for loads that were requested before. Raises EngineError (no server any more)."""
        keeper, attempts = self._started()
        async with self._load_lock:
            await self._wake()
            num_bytes = await self._lease().leave()
            keeper.home, attempts.version = ModelFolder(self._model_dir, -1), -1
            if self._current is not None:
                self._thread.submit(self._stager.drop, self._current)
                self._current = None
        return num_bytes

    def _stage(self, manifest_path: Path) -> StagedVersion:
        """See the base."""
        return self._stager.stage(manifest_path)

    async def _bring_back(self) -> bool:
        """See the base."""
        was_away = await self._lease().take()
        await self._wake()
        return was_away

    def _can_answer(self) -> bool:
        """See the base."""
        return self._lease().has_memory

    async def _load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        keeper, attempts = self._started()
        group = self._group
        assert group is not None, "called although `capabilities.group_ranks` is 0"
        async with self._load_lock:
            start_s, live = time.monotonic(), await keeper.ready()
            try:
                await group.meet(call, live)
            except ServerGone as error:
                await keeper.replace(live.epoch, f"the server did not join a process group ({error})")
                raise TransferBroken(f"the server did not join {call.group}") from error
            attempts.gate.clear()
            self._meter.set_paused(True)
            met_s = time.monotonic()
            try:
                if call.version < attempts.version:
                    attempts.void_newer_than(call.version, live.client)
                transfer_s = await self._bring(live.client, partial(group.receive, call), interruption)
            except (ServerGone, ServerRefused, WeightError) as error:
                group.leave()
                await keeper.replace(live.epoch, f"the server did not receive all of version {call.version} ({error})")
                if isinstance(error, WeightError):
                    raise
                raise TransferBroken(
                    f"the transfer of version {call.version} by {call.group} failed: {error}"
                ) from error
            finally:
                self._meter.set_paused(False)
                attempts.gate.set()
            pause_s = time.monotonic() - met_s
        return LoadReport(version=call.version, stage_s=met_s - start_s, pause_s=pause_s, transfer_s=transfer_s)

    async def _wake(self) -> None:
        """Allocate the memory of a server that released it. Called with the lock held."""
        if self._sleeper is not None:
            await self._sleeper.wake()

    async def _exchange(self, client: SGLangClient, staged: StagedVersion, interruption: Interruption) -> None:
        """See the base."""
        await self._bring(client, partial(_from_folder, staged), interruption)

    async def _bring(self, client: SGLangClient, bring: Bring, interruption: Interruption) -> float:
        """Pause, load a version into the server, verify it, and resume. Returns the seconds of the load."""
        attempts = self._started().attempts
        trace_s, num_running = self._now_s(), attempts.num_streaming
        mode: PauseMode = "in_place" if interruption == "keep_kv" else "retract"
        if interruption != "keep_kv":
            await attempts.end_attempts(client, self._limits.control_timeout_s)
        await client.pause(mode)
        attempts.weights_change()
        bring_s = time.monotonic()
        staged = await bring(client, interruption != "keep_kv")
        bring_s = time.monotonic() - bring_s
        if staged.checksums is not None:
            compare(await client.checksums(), staged.checksums)
            self._num_proven += 1
        self._take_over(staged)
        await client.resume()
        self._trace_swap(trace_s, staged, interruption, num_running, bring_s)
        return bring_s

    # ------------------------------------------------------------------ small parts

    def _checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return server_checksums(tensors, DTYPES[self._dtype], is_head_tied=self._is_head_tied)

    def _lease(self) -> DeviceLease:
        if self._turns is None:
            raise EngineError("the engine was not started")
        return self._turns
