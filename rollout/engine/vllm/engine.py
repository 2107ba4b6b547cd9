"""The vLLM engine: implements the Engine protocol over one server that is launched here.

It contains the start, pause and resume, and the swap in each of the three modes. Answers, processes and the files of a
version are in rollout/engine/server/, HTTP in client.py.

Map of tasks, all on the worker's loop
  generate (one per request)   waits: a slot, the gate, a server, events of its stream   woken by: those
  load_version                 waits: staging (a thread), the load lock, the server       opens and closes the gate
  watch (keeper)               the clock                                                  ends and starts servers
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from areal_like.errors import EngineError, UserError, WeightError
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from areal_like.weights.process_group import GroupCall
from rollout.config import EngineSettings, Interruption
from rollout.engine.loading import DTYPES
from rollout.engine.port import EngineCapabilities, GenerationOutcome, GenerationRequest, LoadReport
from rollout.engine.server.attempts import Attempts
from rollout.engine.server.http import ServerGone, ServerRefused, ServerSilent
from rollout.engine.server.keeper import ServerKeeper
from rollout.engine.server.kind import ModelFolder
from rollout.engine.server.meter import Meter
from rollout.engine.server.process import ServerSetup
from rollout.engine.server.staging import StagedVersion, Stager
from rollout.engine.shape import exact_context, read_config
from rollout.engine.vllm.arguments import plan_launch
from rollout.engine.vllm.client import VLLMClient
from rollout.engine.vllm.probe import Probe, ProbeMaker
from rollout.engine.vllm.servers import VLLMServers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Started:
    """What exists from `start` on."""

    kind: VLLMServers
    keeper: ServerKeeper[VLLMClient]
    attempts: Attempts[VLLMClient]


@dataclass(frozen=True)
class _Ready:
    """A version that can be swapped in. `probe`: proves it; None: it is not proved."""

    staged: StagedVersion
    probe: Probe | None


class VLLMEngine:
    """One vLLM server behind the Engine port; the methods are specified in rollout/engine/port.py."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        dtype: str,
        num_threads: int,
        interruption: Interruption,
        setup: ServerSetup,
        tracer: Tracer | None = None,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        """`interruption` is the mode of all loads: with `keep_kv` old keys and values may be on the server. `report`:
        called with a sentence for each failure from which the engine recovered.
        """
        self._model_dir, self._settings, self._tracer = model_dir, settings, tracer
        self._dtype, self._num_threads, self._interruption = settings.dtype or dtype, num_threads, interruption
        self._where, self._report = setup, report
        self._stager = Stager(model_dir, setup.name)
        self._probes: ProbeMaker | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stager")
        self._load_lock = asyncio.Lock()
        self._loads: set[asyncio.Task[LoadReport]] = set()
        self._meter = Meter()
        self._parts: _Started | None = None
        self._current: StagedVersion | None = None
        self._num_swaps = self._num_proven = 0
        self._context = settings.max_context

    # ------------------------------------------------------------------ life

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; the context is the smaller of the setting and the model's (known after `start`)."""
        return EngineCapabilities(
            num_slots=self._settings.num_slots,
            max_context=self._context,
            interruptions=("recompute", "keep_kv", "drain"),
            per_request_seed=True,
        )

    @property
    def version(self) -> int:
        """Version now used for sampling; -1 before the first load."""
        return self._parts.attempts.version if self._parts else -1

    async def start(self) -> None:
        """Check environment and arguments, and start the server. Raises UserError, EngineError."""
        config = await asyncio.to_thread(read_config, self._model_dir)
        if not config.architectures:
            raise UserError(
                "config.json has no `architectures`, which vLLM needs to choose the model class",
                where=str(self._model_dir),
                remedy="save the model with transformers' save_pretrained",
            )
        self._context = exact_context(config, self._context)
        if self._settings.vllm.probe:
            self._probes = ProbeMaker(config)
        launch = await asyncio.to_thread(
            plan_launch, self._settings, dtype=self._dtype, context=self._context,
            token_bytes=cache_token_bytes(config, DTYPES[self._dtype]), num_threads=self._num_threads,
        )  # fmt: skip
        kind = VLLMServers(self._settings.vllm, launch)
        keeper = ServerKeeper(
            kind,
            self._settings.vllm,
            ModelFolder(self._model_dir, -1),
            url=None,
            seed=self._where.seed,
            port=self._where.port,
            start_timeout_s=self._where.start_timeout_s,
            log_path=self._where.log_path,
            stalled_s=self._meter.stalled_s,
            report=self._report,
        )
        attempts = Attempts(
            keeper,
            self._meter,
            name=self._where.name,
            num_slots=self._settings.num_slots,
            context=self._context,
            vocab_size=int(config.get_text_config().vocab_size),
            keeps_kv=self._interruption == "keep_kv",
            body=kind.body,
        )
        self._parts = _Started(kind, keeper, attempts)
        started_s = time.monotonic()
        await keeper.start()
        log.info("the vLLM server is ready after %.1f s", time.monotonic() - started_s)

    async def close(self) -> None:
        """End the server and everything that waits for it. Safe to call twice."""
        for task in self._loads:
            task.cancel()
        if self._parts is not None:
            await self._parts.keeper.close()
            self._parts.attempts.close()
        self._thread.shutdown(wait=False)
        if self._current is not None:
            self._stager.drop(self._current)
            self._current = None

    def counters(self) -> dict[str, float]:
        """Monotonic: tokens, prefill_tokens, cached_tokens, dropped_tokens (sampled again, because an attempt broke off
        before the server had confirmed their version), swaps, proven_swaps (by a probe prompt), server_restarts;
        busy_s, idle_s, paused_s.
        """
        own = {
            "swaps": self._num_swaps,
            "proven_swaps": self._num_proven,
            "server_restarts": self._parts.keeper.num_restarts if self._parts else 0,
            "dropped_tokens": self._parts.attempts.num_dropped if self._parts else 0,
        }
        return {**self._meter.counters(), **{name: float(count) for name, count in own.items()}}

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """See the port. Raises UserError (the request cannot fit), EngineError (no server any more)."""
        return await self._started().attempts.generate(request)

    def end_session(self, session_key: int) -> None:
        """Does nothing: turns share their prefix in the server's prefix cache, which evicts unused blocks."""

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        return self._parts.attempts.progress() if self._parts else {}

    # ------------------------------------------------------------------ versions

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """See the port. Loads are done in the order in which they are requested; cancelling the caller does not undo
        one."""
        self._started()
        if interruption == "keep_kv" and self._interruption != "keep_kv":
            raise EngineError("the engine was not created with rollout.interruption: keep_kv")
        task = asyncio.create_task(self._load(manifest_path, interruption), name="vllm-load")
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await asyncio.shield(task)

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """Not supported: `capabilities.group_ranks` is 0. Raises EngineError."""
        raise EngineError("a vLLM server cannot join a process group")

    async def release_memory(self) -> int:
        """Not supported: the descriptor's `releases_memory` is False. Raises EngineError."""
        raise EngineError("a vLLM server cannot release its memory")

    async def _load(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            start_s, trace_s = time.monotonic(), self._now_s()
            ready = await asyncio.get_running_loop().run_in_executor(self._thread, self._stage, manifest_path)
            stage_s = time.monotonic() - start_s
            self._trace("stage", trace_s, "stager", version=ready.staged.version)
            attempts = self._started().attempts
            attempts.gate.clear()
            try:
                if interruption == "drain":
                    while attempts.num_streaming:  # a server that hangs meanwhile is replaced, which ends them too
                        await attempts.idle.wait()
                pause_s = await self._swap(ready, interruption)
            except BaseException:
                self._stager.drop(ready.staged)
                raise
            finally:
                attempts.gate.set()
        return LoadReport(version=ready.staged.version, stage_s=stage_s, pause_s=pause_s)

    def _stage(self, manifest_path: Path) -> _Ready:
        """Write the folder of a version, and compute its probe. Raises WeightError."""
        staged = self._stager.stage(manifest_path)
        try:
            return _Ready(staged, self._probes.make(staged.version, staged.folder) if self._probes else None)
        except BaseException:
            self._stager.drop(staged)
            raise

    async def _swap(self, ready: _Ready, interruption: Interruption) -> float:
        """Replace the weights at a token boundary and return the pause in seconds. A server that dies meanwhile, or is
        not done within `load_timeout_s`, or whose connection breaks during the load, is replaced, and the swap is made
        on the new server. Raises WeightError: the old version stays in use.
        """
        parts, staged = self._started(), ready.staged
        keeper, attempts = parts.keeper, parts.attempts
        limit_s = self._settings.vllm.load_timeout_s
        while True:
            live = await keeper.ready()
            start_s = time.monotonic()
            self._meter.set_paused(True)
            try:
                if staged.version < attempts.version:
                    attempts.void_newer_than(staged.version, live.client)
                async with asyncio.timeout(limit_s):
                    await self._exchange(live.client, ready, interruption)
                break
            except (TimeoutError, ServerSilent) as error:
                words = str(error) or f"not finished within {limit_s:g} s"
                reason = f"the server hangs in the swap to version {staged.version} ({words})"
                await keeper.replace(live.epoch, reason, is_forgiven=False)
            except ServerGone as error:
                found = await keeper.settle(live.epoch, str(error))
                if found.epoch == live.epoch and not attempts.proven.is_set():
                    # vLLM refuses to begin another update while one is open, and its weights are not known.
                    reason = f"the connection failed while loading version {staged.version} ({error})"
                    await keeper.replace(live.epoch, reason, is_forgiven=False)
            except ServerRefused as error:
                log.warning(
                    "the server rejected version %d, but may have loaded a part of this version", staged.version
                )
                await keeper.replace(live.epoch, f"the server rejected version {staged.version}")
                raise WeightError(f"vLLM cannot load version {staged.version}: {error.text[:400]}") from error
            except WeightError:
                await keeper.replace(live.epoch, f"the weights of the server differ from version {staged.version}")
                raise
            finally:
                attempts.proven.set()
                self._meter.set_paused(False)
        return time.monotonic() - start_s

    async def _exchange(self, client: VLLMClient, ready: _Ready, interruption: Interruption) -> None:
        """Pause, load a version into the server, resume, and verify it. From the load on, nothing that it sends is
        looked at before the version is verified (`Attempts.proven`)."""
        parts, staged = self._started(), ready.staged
        attempts = parts.attempts
        trace_s, num_running = self._now_s(), attempts.num_streaming
        if interruption != "keep_kv":
            await attempts.end_attempts(client, self._settings.vllm.control_timeout_s)
        await client.pause(clear_cache=interruption != "keep_kv")
        attempts.weights_change()
        attempts.proven.clear()
        load_s = time.monotonic()
        await client.load(str(staged.folder), staged.version, staged.shapes)
        load_s = time.monotonic() - load_s
        await client.resume()
        if ready.probe is not None:
            await ready.probe.check(client)
            self._num_proven += 1
        parts.keeper.home, parts.kind.probe = ModelFolder(staged.folder, staged.version), ready.probe
        old, self._current, attempts.version = self._current, staged, staged.version
        self._num_swaps += 1
        attempts.prefix_key += 1
        if old is not None:
            self._thread.submit(self._stager.drop, old)
        args = {"version": staged.version, "interruption": interruption, "running": num_running}
        self._trace("swap", trace_s, "engine", transfer_s=round(load_s, 6), **args)

    # ------------------------------------------------------------------ small parts

    def _started(self) -> _Started:
        if self._parts is None:
            raise EngineError("the engine was not started")
        return self._parts

    def _now_s(self) -> float:
        return self._tracer.now_s() if self._tracer else 0.0

    def _trace(self, name: str, start_s: float, lane: str, **args: object) -> None:
        if self._tracer:
            self._tracer.complete(name, start_s, self._tracer.now_s(), lane, **args)


def cache_token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * dtype.itemsize)
