"""What the engines with servers share: their state, their requests, and the frame of a swap.

A subclass starts its kind of server (`start`) and exchanges the weights in it (`_exchange`). Answers are in
attempts.py, processes in process.py and keeper.py, HTTP in http.py, and the files of a version in staging.py.

Map of tasks, all on the worker's loop
  generate (one per request)   waits: a slot, the gate, a server, events of its stream   woken by: those
  load_version                 waits: staging (a thread), the load lock, the server       opens and closes the gate
  watch (keeper)               the clock                                                  ends and starts servers
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, NotRequired, TypedDict, TypeVar, Unpack

from transformers import PreTrainedConfig

from areal_like.errors import EngineError, UserError, WeightError
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from rollout.config import EngineSettings, Interruption
from rollout.engine.descriptor import EngineContext
from rollout.engine.port import EngineCapabilities, GenerationOutcome, GenerationRequest, LoadReport
from rollout.engine.server.attempts import Attempts
from rollout.engine.server.http import ServerGone, ServerRefused, ServerSilent
from rollout.engine.server.keeper import ServerKeeper
from rollout.engine.server.kind import ClientT, ModelFolder, ServerKind, ServerLimits
from rollout.engine.server.meter import Meter
from rollout.engine.server.process import ServerSetup
from rollout.engine.server.staging import StagedVersion, Stager, Summing
from rollout.engine.shape import exact_context, read_config

log = logging.getLogger(__name__)

VersionT = TypeVar("VersionT", bound=StagedVersion)

DYING_S = 1.0
"""A server whose engine process dies answers with status 500 shortly before it ends."""


class Served(TypedDict):
    """Arguments of every engine with servers. interruption: the mode of all loads, on which a server's start may
    depend. report: called with a sentence for each failure from which the engine recovered.
    """

    dtype: str
    num_threads: int
    interruption: Interruption
    setup: ServerSetup
    tracer: NotRequired[Tracer | None]
    report: NotRequired[Callable[[str], None]]


def served(context: EngineContext, kind: str, port: int | None) -> Served:
    """The arguments for a worker. kind: of the engine; port: of its server; None: a free one."""
    return {
        "dtype": context.dtype,
        "num_threads": context.num_threads,
        "interruption": context.interruption,
        "setup": ServerSetup(
            context.worker,
            context.log_dir / f"{context.worker}-{kind}.log",
            context.seed + context.index,
            port=port,
            start_timeout_s=context.startup_timeout_s,
        ),
        "tracer": context.tracer,
        "report": context.report,
    }


class Running(NamedTuple, Generic[ClientT]):
    """What exists from `start` on."""

    keeper: ServerKeeper[ClientT]
    attempts: Attempts[ClientT]


class ServerEngine(ABC, Generic[ClientT, VersionT]):
    """One server behind the Engine port; the methods are specified in rollout/engine/port.py."""

    title: ClassVar[str]
    """Name of the server's program in messages."""

    def __init__(
        self, model_dir: Path, settings: EngineSettings, limits: ServerLimits, summing: Summing | None = None,
        **parts: Unpack[Served],
    ) -> None:  # fmt: skip
        """limits: section of the settings by which the server is watched. summing: computes the checksums that the
        server must report."""
        self._model_dir, self._settings, self._limits = model_dir, settings, limits
        self._dtype, self._num_threads = settings.dtype or parts["dtype"], parts["num_threads"]
        self._interruption, self._where = parts["interruption"], parts["setup"]
        self._tracer, self._report = parts.get("tracer"), parts.get("report", log.warning)
        self._stager = Stager(model_dir, self._where.name, summing)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stager")
        self._load_lock = asyncio.Lock()
        self._loads: set[asyncio.Task[LoadReport]] = set()
        self._meter = Meter()
        self._keeper: ServerKeeper[ClientT] | None = None
        self._attempts: Attempts[ClientT] | None = None
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
        return self._attempts.version if self._attempts else -1

    async def _read_config(self) -> PreTrainedConfig:
        """The model's configuration, by which the context is limited. Raises UserError."""
        config = await asyncio.to_thread(read_config, self._model_dir)
        if not config.architectures:
            what = f"config.json has no `architectures`, by which {self.title} chooses the model's code"
            remedy = "save the model with transformers' save_pretrained"
            raise UserError(what, where=str(self._model_dir), remedy=remedy)
        self._context = exact_context(config, self._context)
        return config

    def _make_parts(
        self, kind: ServerKind[ClientT], config: PreTrainedConfig, *, url: str | None = None, key: str | None = None,
        experts_shape: tuple[int, int] | None = None,
    ) -> Running[ClientT]:  # fmt: skip
        """Create keeper and attempts; no server is started yet. url, key: of a server that runs already."""
        self._keeper = ServerKeeper(
            kind,
            self._limits,
            ModelFolder(self._model_dir, -1),
            url=url,
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
            experts_shape=experts_shape,
        )
        return Running(self._keeper, self._attempts)

    async def close(self) -> None:
        """End the server and everything that waits for it. Safe to call twice."""
        for task in self._loads:
            task.cancel()
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
        before the server had confirmed their version), swaps, proven_swaps (verified in the server), server_restarts;
        busy_s, idle_s, paused_s.
        """
        own = {
            "swaps": self._num_swaps,
            "proven_swaps": self._num_proven,
            "server_restarts": self._keeper.num_restarts if self._keeper else 0,
            "dropped_tokens": self._attempts.num_dropped if self._attempts else 0,
        }
        return {**self._meter.counters(), **{name: float(count) for name, count in own.items()}}

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """See the port. Raises UserError (the request cannot fit), EngineError (no server any more)."""
        return await self._started().attempts.generate(request)

    def end_session(self, session_key: int) -> None:
        """Does nothing: turns share their prefix in the server's prefix cache, which evicts unused entries."""

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        return self._attempts.progress() if self._attempts else {}

    # ------------------------------------------------------------------ versions

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """See the port. Loads are done in the order in which they are requested; cancelling the caller does not undo
        one."""
        self._started()
        if interruption == "keep_kv" and self._interruption != "keep_kv":
            raise EngineError("keep_kv requires a server that was started with rollout.interruption: keep_kv")
        return await self._in_order(self._load(manifest_path, interruption))

    async def _in_order(self, load: Coroutine[Any, Any, LoadReport]) -> LoadReport:
        task = asyncio.create_task(load, name=f"{self.title}-load")
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await asyncio.shield(task)

    async def _load(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            start_s, trace_s = time.monotonic(), self._now_s()
            staged = await asyncio.get_running_loop().run_in_executor(self._thread, self._stage, manifest_path)
            stage_s = time.monotonic() - start_s
            self._trace("stage", trace_s, "stager", version=staged.version)
            attempts = self._started().attempts
            attempts.gate.clear()
            try:
                was_away = await self._bring_back()
                if interruption == "drain" and not was_away:
                    while attempts.num_streaming:  # a server that hangs meanwhile is replaced, which ends them too
                        await attempts.idle.wait()
                pause_s = await self._swap(staged, interruption)
            except BaseException:
                self._stager.drop(staged)
                raise
            finally:
                if self._can_answer():
                    attempts.gate.set()
        return LoadReport(version=staged.version, stage_s=stage_s, pause_s=pause_s)

    @abstractmethod
    def _stage(self, manifest_path: Path) -> VersionT:
        """Write the folder of a version; called in a thread. Raises WeightError."""

    @abstractmethod
    async def _exchange(self, client: ClientT, staged: VersionT, interruption: Interruption) -> None:
        """Pause the server, replace its weights by a version, verify them (ServerRefused, WeightError), call
        `_take_over`, and resume."""

    async def _bring_back(self) -> bool:
        """Start a server that was ended for a while, or have it allocate memory that it released. Returns whether
        there was none that could answer."""
        return False

    def _can_answer(self) -> bool:
        """Whether there is a server with memory."""
        return True

    async def _swap(self, staged: VersionT, interruption: Interruption) -> float:
        """Replace the weights at a token boundary and return the pause in seconds. A server that dies meanwhile, or is
        not done within `load_timeout_s`, is replaced, and the swap is made on the new server; so is one whose
        connection breaks while its weights must not be used yet (`Attempts.proven`). Raises WeightError: the old
        version stays in use.
        """
        keeper, attempts = self._started()
        limit_s = self._limits.load_timeout_s
        while True:
            live = await keeper.ready()
            start_s = time.monotonic()
            self._meter.set_paused(True)
            try:
                if staged.version < attempts.version:
                    attempts.void_newer_than(staged.version, live.client)
                async with asyncio.timeout(limit_s):
                    await self._exchange(live.client, staged, interruption)
                break
            except (TimeoutError, ServerSilent) as error:
                words = str(error) or f"not finished within {limit_s:g} s"
                reason = f"the server hangs in the swap to version {staged.version} ({words})"
                await keeper.replace(live.epoch, reason, is_forgiven=False)
            except ServerGone as error:
                found = await keeper.settle(live.epoch, str(error))
                if found.epoch == live.epoch and not attempts.proven.is_set():
                    reason = f"the connection failed while loading version {staged.version} ({error})"
                    await keeper.replace(live.epoch, reason, is_forgiven=False)
            except ServerRefused as error:
                if error.status >= 500:
                    await asyncio.sleep(DYING_S)
                    if (await keeper.settle(live.epoch, str(error))).epoch != live.epoch:
                        continue  # the version is not at fault
                log.warning(
                    "the server rejected version %d, but may have loaded a part of this version", staged.version
                )
                await keeper.replace(live.epoch, f"the server rejected version {staged.version}")
                what = f"{self.title} cannot load version {staged.version}: {error.text[:400]}"
                raise WeightError(what) from error
            except WeightError:
                await keeper.replace(live.epoch, f"the weights of the server differ from version {staged.version}")
                raise
            finally:
                attempts.proven.set()
                self._meter.set_paused(False)
        return time.monotonic() - start_s

    def _take_over(self, staged: StagedVersion) -> None:
        """Count the swap, and remove the folder of the version before. Servers start with this one from now on."""
        keeper, attempts = self._started()
        keeper.home = ModelFolder(staged.folder, staged.version)
        old, self._current, attempts.version = self._current, staged, staged.version
        self._num_swaps += 1
        attempts.prefix_key += 1
        if old is not None and old is not staged:  # the same one again where a server died between load and resume
            self._thread.submit(self._stager.drop, old)

    # ------------------------------------------------------------------ small parts

    def _started(self) -> Running[ClientT]:
        if self._keeper is None or self._attempts is None:
            raise EngineError("the engine was not started")
        return Running(self._keeper, self._attempts)

    def _now_s(self) -> float:
        return self._tracer.now_s() if self._tracer else 0.0

    def _trace(self, name: str, start_s: float, lane: str, **args: object) -> None:
        if self._tracer:
            self._tracer.complete(name, start_s, self._tracer.now_s(), lane, **args)

    def _trace_swap(
        self, start_s: float, staged: StagedVersion, interruption: Interruption, num_running: int, load_s: float
    ) -> None:
        args = {"version": staged.version, "interruption": interruption, "running": num_running}
        self._trace("swap", start_s, "engine", transfer_s=round(load_s, 6), **args)
