"""The SGLang engine: implements the Engine protocol over one server that is launched here or attached to.

It contains the start, pause and resume, and the swap in each of the three modes. Answers are in attempts.py, processes
in process.py and keeper.py, HTTP in client.py, and the files of a version in staging.py.

Map of tasks, all on the worker's loop
  generate (one per request)   waits: a slot, the gate, a server, events of its stream   woken by: those
  load_version                 waits: staging (a thread), the load lock, the server       opens and closes the gate
  watch (keeper)               the clock                                                  ends and starts servers
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from areal_like.device_names import names_cpu
from areal_like.errors import EngineError, TransferBroken, UserError, WeightError
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from areal_like.weights.process_group import GroupCall
from rollout.config import EngineSettings, Interruption
from rollout.engine.loading import DTYPES
from rollout.engine.port import (
    EngineCapabilities,
    GenerationOutcome,
    GenerationRequest,
    LoadReport,
)
from rollout.engine.server.attempts import Attempts
from rollout.engine.server.http import ServerGone, ServerRefused, ServerSilent
from rollout.engine.server.keeper import ServerKeeper
from rollout.engine.server.kind import ModelFolder
from rollout.engine.server.meter import Meter
from rollout.engine.server.process import ServerSetup
from rollout.engine.server.staging import StagedVersion, Stager
from rollout.engine.sglang.arguments import plan_launch
from rollout.engine.sglang.attach import check_attached, read_key
from rollout.engine.sglang.by_group import RANKS, ServerInGroup
from rollout.engine.sglang.client import PauseMode, SGLangClient
from rollout.engine.sglang.layout import FAMILIES, check_experts, check_family, compare, experts_shape, server_checksums
from rollout.engine.sglang.servers import SGLangServers
from rollout.engine.sglang.sleep import Sleeper, start_sleeper
from rollout.engine.sglang.turns import DeviceLease
from rollout.engine.shape import exact_context, read_config

log = logging.getLogger(__name__)

Bring = Callable[[SGLangClient, bool], Awaitable[StagedVersion]]
"""Loads a version into a paused server, and flushes its prefix cache or keeps it."""


async def _from_folder(staged: StagedVersion, client: SGLangClient, flush_cache: bool) -> StagedVersion:
    await client.load(str(staged.folder), staged.version, flush_cache=flush_cache)
    return staged


class SGLangEngine:
    """One SGLang server behind the Engine port; the methods are specified in rollout/engine/port.py."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        dtype: str,
        num_threads: int,
        interruption: Interruption,
        setup: ServerSetup,
        attach: str | None = None,
        tracer: Tracer | None = None,
        report: Callable[[str], None] = log.warning,
        starts_empty: bool = False,
    ) -> None:
        """`interruption` is the mode of all loads; the scheduler depends on it. `attach`: a server's address. `report`:
        called with a sentence for each failure from which the engine recovered. `starts_empty`: the device is shared in
        turns; the server starts with the first version.
        """
        self._starts_empty = starts_empty
        self._model_dir, self._settings, self._tracer = model_dir, settings, tracer
        self._dtype, self._num_threads, self._interruption = settings.dtype or dtype, num_threads, interruption
        self._where, self._attach, self._report = setup, attach, report
        self._stager = Stager(model_dir, setup.name, self._checksums if settings.sglang.checksums else None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stager")
        self._load_lock = asyncio.Lock()
        self._loads: set[asyncio.Task[LoadReport]] = set()
        self._meter = Meter()
        self._keeper: ServerKeeper[SGLangClient] | None = None
        self._current: StagedVersion | None = None
        self._attempts: Attempts[SGLangClient] | None = None
        self._num_swaps = self._num_proven = 0
        self._is_head_tied = False
        self._turns: DeviceLease | None = None
        self._group: ServerInGroup | None = None
        self._sleeper: Sleeper | None = None
        self._context = settings.max_context

    # ------------------------------------------------------------------ life

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; the context is the smaller of the setting and the model's (known after `start`)."""
        return EngineCapabilities(
            num_slots=self._settings.num_slots,
            max_context=self._context,
            interruptions=("recompute", "keep_kv", "drain"),
            per_request_seed=self._settings.sglang.deterministic,
            group_ranks=RANKS if self._group is not None else 0,
        )

    @property
    def version(self) -> int:
        """Version now used for sampling; -1 before the first load."""
        return self._attempts.version if self._attempts else -1

    async def start(self) -> None:
        """Check environment and arguments, and start the server. Raises UserError, EngineError."""
        config = await asyncio.to_thread(read_config, self._model_dir)
        if not config.architectures:
            what = "config.json has no `architectures`, which SGLang needs to choose the model class"
            raise UserError(
                what, where=str(self._model_dir), remedy="save the model with transformers' save_pretrained"
            )
        self._context = exact_context(config, self._context)
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
        self._keeper = ServerKeeper(
            kind,
            self._settings.sglang,
            ModelFolder(self._model_dir, -1),
            url=self._attach,
            key=key,
            seed=self._where.seed,
            port=self._where.port,
            start_timeout_s=self._where.start_timeout_s,
            log_path=self._where.log_path,
            stalled_s=self._meter.stalled_s,
            report=self._report,
        )
        self._attempts = Attempts(
            self._keeper,
            self._meter,
            name=self._where.name,
            num_slots=self._settings.num_slots,
            context=self._context,
            vocab_size=int(config.get_text_config().vocab_size),
            keeps_kv=self._interruption == "keep_kv",
            body=kind.body,
            experts_shape=experts,
        )
        num_gpus = self._settings.sglang.tp_size
        is_cpu = names_cpu(self._settings.device)
        self._turns = DeviceLease(self._keeper, self._attempts, is_cpu=is_cpu, num_gpus=num_gpus)
        if self._starts_empty:
            self._attempts.gate.clear()
            return
        await self._turns.take()
        if launch is not None and is_cpu and num_gpus == 1 and config.model_type in FAMILIES:
            folder = self._keeper.scratch / "versions"
            self._group = ServerInGroup(self._stager, self._thread, self._checksums, folder)
        self._sleeper = start_sleeper(self._settings.sglang, self._keeper, self._attempts, self._load_lock)

    async def close(self) -> None:
        """End the server and everything that waits for it. Safe to call twice."""
        for task in self._loads:
            task.cancel()
        if self._sleeper is not None:
            self._sleeper.close()
        if self._group is not None:
            self._group.close()
        if self._keeper is not None:
            await self._keeper.close()
        if self._attempts is not None:
            self._attempts.close()
        self._thread.shutdown(wait=False)
        if self._current is not None:
            self._stager.drop(self._current)
            self._current = None

    def counters(self) -> dict[str, float]:
        """Monotonic: tokens, prefill_tokens, cached_tokens, dropped_tokens (sampled again, because an attempt broke off
        before the server had confirmed their version), swaps, proven_swaps (by the server's own checksums), sleeps,
        server_restarts; busy_s, idle_s, paused_s.
        """
        own = {
            "swaps": self._num_swaps,
            "proven_swaps": self._num_proven,
            "sleeps": self._sleeper.num_sleeps if self._sleeper else 0,
            "server_restarts": self._keeper.num_restarts if self._keeper else 0,
            "dropped_tokens": self._attempts.num_dropped if self._attempts else 0,
        }
        return {**self._meter.counters(), **{name: float(count) for name, count in own.items()}}

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """See the port. Raises UserError (the request cannot fit), EngineError (no server any more)."""
        _, attempts, _ = self._started()
        return await attempts.generate(request)

    def end_session(self, session_key: int) -> None:
        """Does nothing: turns share their prefix in the server's radix cache, which evicts unused entries."""

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        return self._attempts.progress() if self._attempts else {}

    # ------------------------------------------------------------------ versions

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """See the port. Loads are done in the order in which they are requested; cancelling the caller does not undo
        one."""
        self._started()
        if interruption == "keep_kv" and self._interruption != "keep_kv":
            raise EngineError("the server was not started with rollout.interruption: keep_kv")
        return await self._in_order(self._load(manifest_path, interruption))

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """See the port. The server is also paused while it joins a new group. If it fails in the group, it is
        replaced.
        """
        self._started()
        return await self._in_order(self._load_from_group(call, interruption))

    async def _in_order(self, load: Coroutine[Any, Any, LoadReport]) -> LoadReport:
        task = asyncio.create_task(load, name="sglang-load")
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await asyncio.shield(task)

    async def release_memory(self) -> int:
        """See the port. Waits for loads that were requested before. Raises EngineError (no server any more)."""
        keeper, attempts, turns = self._started()
        async with self._load_lock:
            await self._wake()
            num_bytes = await turns.leave()
            keeper.home, attempts.version = ModelFolder(self._model_dir, -1), -1
            if self._current is not None:
                self._thread.submit(self._stager.drop, self._current)
                self._current = None
        return num_bytes

    async def _load(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            start_s, trace_s = time.monotonic(), self._now_s()
            staged = await asyncio.get_running_loop().run_in_executor(self._thread, self._stager.stage, manifest_path)
            stage_s = time.monotonic() - start_s
            self._trace("stage", trace_s, "stager", version=staged.version)
            _, attempts, turns = self._started()
            attempts.gate.clear()
            try:
                was_away = await turns.take()
                await self._wake()
                if interruption == "drain" and not was_away:
                    while attempts.num_streaming:  # a server that hangs meanwhile is replaced, which ends them too
                        await attempts.idle.wait()
                pause_s = await self._swap(staged, interruption)
            except BaseException:
                self._stager.drop(staged)
                raise
            finally:
                if turns.has_memory:
                    attempts.gate.set()
        return LoadReport(version=staged.version, stage_s=stage_s, pause_s=pause_s)

    async def _load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        keeper, attempts, _ = self._started()
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
                transfer_s = await self._exchange(live.client, partial(group.receive, call), interruption)
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

    async def _swap(self, staged: StagedVersion, interruption: Interruption) -> float:
        """Replace the weights at a token boundary and return the pause in seconds. A server that dies meanwhile, or is
        not done within `load_timeout_s`, is replaced, and the swap is made on the new server. Raises WeightError: the
        old version stays in use.
        """
        keeper, attempts, _ = self._started()
        limit_s = self._settings.sglang.load_timeout_s
        while True:
            live = await keeper.ready()
            start_s = time.monotonic()
            self._meter.set_paused(True)
            try:
                if staged.version < attempts.version:
                    attempts.void_newer_than(staged.version, live.client)
                async with asyncio.timeout(limit_s):
                    await self._exchange(live.client, partial(_from_folder, staged), interruption)
                break
            except (TimeoutError, ServerSilent) as error:
                words = str(error) or f"not finished within {limit_s:g} s"
                reason = f"the server hangs in the swap to version {staged.version} ({words})"
                await keeper.replace(live.epoch, reason, is_forgiven=False)
            except ServerGone as error:
                await keeper.settle(live.epoch, str(error))
            except ServerRefused as error:
                log.warning(
                    "the server rejected version %d, but may have loaded a part of this version", staged.version
                )
                await keeper.replace(live.epoch, f"the server rejected version {staged.version}")
                raise WeightError(f"SGLang cannot load version {staged.version}: {error.text[:400]}") from error
            except WeightError:
                await keeper.replace(live.epoch, f"the weights of the server differ from version {staged.version}")
                raise
            finally:
                self._meter.set_paused(False)
        return time.monotonic() - start_s

    async def _exchange(self, client: SGLangClient, bring: Bring, interruption: Interruption) -> float:
        """Pause, load a version into the server, verify it, and resume. Returns the seconds of the load."""
        keeper, attempts, _ = self._started()
        trace_s, num_running = self._now_s(), attempts.num_streaming
        mode: PauseMode = "in_place" if interruption == "keep_kv" else "retract"
        if interruption != "keep_kv":
            await attempts.end_attempts(client, self._settings.sglang.control_timeout_s)
        await client.pause(mode)
        attempts.weights_change()
        bring_s = time.monotonic()
        staged = await bring(client, interruption != "keep_kv")
        bring_s = time.monotonic() - bring_s
        if staged.checksums is not None:
            compare(await client.checksums(), staged.checksums)
            self._num_proven += 1
        keeper.home = ModelFolder(staged.folder, staged.version)
        old, self._current, attempts.version = self._current, staged, staged.version
        self._num_swaps += 1
        attempts.prefix_key += 1
        if old is not None and old is not staged:  # the same one again where a server died between load and resume
            self._thread.submit(self._stager.drop, old)
        await client.resume()
        args = {"version": staged.version, "interruption": interruption, "running": num_running}
        self._trace("swap", trace_s, "engine", transfer_s=round(bring_s, 6), **args)
        return bring_s

    # ------------------------------------------------------------------ small parts

    def _checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return server_checksums(tensors, DTYPES[self._dtype], is_head_tied=self._is_head_tied)

    def _started(self) -> tuple[ServerKeeper[SGLangClient], Attempts[SGLangClient], DeviceLease]:
        if self._keeper is None or self._attempts is None or self._turns is None:
            raise EngineError("the engine was not started")
        return self._keeper, self._attempts, self._turns

    def _now_s(self) -> float:
        return self._tracer.now_s() if self._tracer else 0.0

    def _trace(self, name: str, start_s: float, lane: str, **args: object) -> None:
        if self._tracer:
            self._tracer.complete(name, start_s, self._tracer.now_s(), lane, **args)
