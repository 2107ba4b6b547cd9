"""The embedded engine: implements the Engine protocol over a core that runs in a separate thread.

Commands are sent to the thread and run at token boundaries; results return by one loop callback per step that ended an
answer. A second thread stages versions. The forward pass, admission and sampling are in decoder, scheduler and core.

Map of threads
  caller's asyncio loop   posts commands; awaits futures; `progress` takes a snapshot under the core's lock
  engine                  loop: commands -> swap if one is ready -> admit -> one token for all rows -> deliver what
                          ended; without work it sleeps until a command wakes it (never longer than REST_S)
  stager                  maps, checks and copies a published version into the spare weights, one version at a time;
                          a load requested meanwhile waits for the previous one
  turn-watch              fails the engine if its thread hangs (turn_watch.py)
A crash or a hang of the engine thread fails every request, present and future, with EngineError, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from areal_like.device_names import names_gpu
from areal_like.errors import EngineError, WeightError
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from areal_like.weights.process_group import GroupCall
from rollout.config import EngineSettings, Interruption
from rollout.engine.adapter_layout import BASE
from rollout.engine.core import Ended, GenerationCore
from rollout.engine.descriptor import EngineContext
from rollout.engine.device import during_generation, finish
from rollout.engine.group_member import GroupMember
from rollout.engine.loading import DTYPES, open_verified, tensors_of
from rollout.engine.making import make_core
from rollout.engine.port import (
    EngineCapabilities,
    GenerationOutcome,
    GenerationRequest,
    LoadReport,
)
from rollout.engine.requests import check_request, ended_already
from rollout.engine.slots import Answer
from rollout.engine.turn_watch import TurnWatch

log = logging.getLogger(__name__)

REST_S = 1.0
JOIN_S = 30.0


@dataclass
class _Swap:
    """A staged version that waits for a token boundary."""

    version: int
    interruption: Interruption
    future: asyncio.Future[float]
    bring: Callable[[], float] | None = None
    """Fills the spare weights within the pause, and returns the seconds of the transfer; None: they are filled
    already.
    """
    transfer_s: float = 0.0


class EmbeddedEngine:
    """Continuous batching inside this process; the methods are specified in rollout/engine/port.py."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        dtype: str,
        num_threads: int,
        tracer: Tracer | None = None,
        starts_empty: bool = False,
        has_spare: bool = True,
        adapters: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """`dtype` is the model's; `settings.dtype` overrides it. Weights are allocated at the first `load_version`, and
        with `starts_empty` all other memory too. has_spare: False for one set of weights, loaded before the first
        answer. adapters: folders of the adapters that requests may name.
        """
        self._adapters = adapters
        self._adapter_numbers = {name: number for number, name in enumerate(adapters)}
        self._starts_empty, self._has_spare = starts_empty, has_spare
        self._model_dir, self._settings, self._tracer = model_dir, settings, tracer
        self._dtype = DTYPES[settings.dtype or dtype]
        self._num_threads = num_threads
        self._core: GenerationCore | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="stager")
        self._load_lock = asyncio.Lock()
        self._futures: dict[int, asyncio.Future[GenerationOutcome]] = {}
        self._control: set[asyncio.Future[Any]] = set()
        self._loads: set[asyncio.Task[LoadReport]] = set()
        self._num_tickets = 0
        self._swap: _Swap | None = None
        self._member: GroupMember | None = None
        """Membership in the process group for weights, from the first call on."""
        self._is_paused = False
        self._is_closing = False
        self._error: EngineError | None = None
        self._spent_s = {"busy_s": 0.0, "idle_s": 0.0}
        self._watch = TurnWatch(settings.stall_timeout_s, self._fail)

    # ------------------------------------------------------------------ life

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; the context is the smaller of the setting and the model's (known after `start`)."""
        return EngineCapabilities(
            num_slots=self._settings.num_slots,
            max_context=self._core.slots.max_context if self._core else self._settings.max_context,
            interruptions=("recompute", "keep_kv", "drain"),
            per_request_seed=True,
            group_ranks=1,
            device="cuda" if names_gpu(self._settings.device) else "cpu",
        )

    @property
    def version(self) -> int:
        """Version now used for sampling; -1 before the first load."""
        return self._core.version if self._core else -1

    async def start(self) -> None:
        """Read the config, allocate weights and cache, start the engine thread. Raises UserError."""
        self._loop = asyncio.get_running_loop()
        self._core = await asyncio.to_thread(
            make_core, self._model_dir, self._settings, self._dtype,
            num_threads=self._num_threads, tracer=self._tracer, has_memory=not self._starts_empty,
            has_spare=self._has_spare, adapters=list(self._adapters.values()),
        )  # fmt: skip
        self._core.on_pass = self._watch.turn
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        self._watch.start()

    async def close(self) -> None:
        """End running requests as `cancelled`, stop the threads. Safe to call twice."""
        self._is_closing = True
        self._watch.close()
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, JOIN_S)
        if self._member is not None:
            self._stager.submit(self._member.leave)
        self._stager.shutdown(wait=False)
        await asyncio.sleep(0)  # lets the last delivery run
        self._fail_pending(EngineError("the engine was closed"))

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """See the port. Raises UserError (the request cannot fit), EngineError (the engine failed)."""
        core = self._check_alive()
        context = core.slots.max_context
        check_request(request, context=context, vocab_size=core.vocab_size, adapters=self._adapters)
        if (outcome := ended_already(request)) is not None:
            return outcome
        stop_ids = np.array(sorted(set(request.sampling.stop_token_ids)), np.int64)
        self._num_tickets += 1
        ticket = self._num_tickets
        future = self._futures[ticket] = self._loop.create_future()
        answer = Answer(ticket, request, stop_ids, time.monotonic(), adapter=self.adapter_number(request.adapter))
        self._post(partial(core.submit, answer))
        try:
            return await future
        except asyncio.CancelledError:
            self._post(partial(core.cancel, ticket))
            raise
        finally:
            del self._futures[ticket]

    def adapter_number(self, name: str) -> int:
        """Number of an adapter in the decoder; BASE for the empty name."""
        return self._adapter_numbers[name] if name else BASE

    def end_session(self, session_key: int) -> None:
        """Drop the kept keys and values of this conversation at the next token boundary."""
        core = self._core
        if core is not None:
            self._post(lambda: core.end_session(session_key))

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        return self._core.progress() if self._core else {}

    async def pause(self) -> None:
        """Pause at the next token boundary. Only tests use it; it is not part of the Engine protocol."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Resume generation."""
        await self._set_paused(False)

    async def _set_paused(self, is_paused: bool) -> None:
        self._check_alive()
        future = self._control_future()

        def apply() -> None:
            self._is_paused = is_paused
            self._settle(future, None)

        self._post(apply)
        await future

    def counters(self) -> dict[str, float]:
        """Monotonic: tokens, prefill_tokens, shared_prefill_tokens (copied from a row of the same group),
        kept_prefill_tokens (kept from the turn before), session_evictions, steps, swaps, moved_rows; busy_s, idle_s,
        paused_s.
        """
        core = self._core
        counts = {**core.counts, "session_evictions": core.sessions.num_evicted} if core else {}
        return {**counts, **self._spent_s, "paused_s": core.paused_s if core else 0.0}

    # ------------------------------------------------------------------ versions

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """See the port. Loads are done in the order in which they are requested.

        With `drain` a paused engine swaps once it is resumed and empty. Cancelling the caller does not undo a load.
        """
        return await self._in_order(self._load(manifest_path, interruption))

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """See the port. The payload is received, checked and copied into the spare weights within the pause."""
        return await self._in_order(self._load_from_group(call, interruption))

    async def release_memory(self) -> int:
        """See the port. Waits for loads that were requested before."""
        async with self._load_lock:
            core = self._check_alive()
            future = self._control_future()

            self._post(lambda: self._settle(future, core.release()))
            return int(await future)

    async def _in_order(self, load: Coroutine[Any, Any, LoadReport]) -> LoadReport:
        try:
            self._check_alive()
        except EngineError:
            load.close()
            raise
        task = self._loop.create_task(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await asyncio.shield(task)

    async def _load(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            core = self._check_alive()
            start_s = time.monotonic()
            version = await self._loop.run_in_executor(self._stager, self._stage, core, manifest_path)
            return await self._at_boundary(version, interruption, time.monotonic() - start_s)

    async def _load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            core = self._check_alive()
            if self._member is None:
                self._member = GroupMember(core.device)
            start_s = time.monotonic()
            await self._loop.run_in_executor(self._stager, self._member.meet, call)
            bring = partial(self._bring, core, self._member, call)
            return await self._at_boundary(call.version, interruption, time.monotonic() - start_s, bring)

    async def _at_boundary(
        self, version: int, interruption: Interruption, stage_s: float, bring: Callable[[], float] | None = None
    ) -> LoadReport:
        self._check_alive()  # a future created after the engine's end would wait indefinitely
        swap = _Swap(version, interruption, self._control_future(), bring)

        def apply() -> None:
            self._swap = swap

        self._post(apply)
        pause_s = await swap.future
        return LoadReport(version=version, stage_s=stage_s, pause_s=pause_s, transfer_s=swap.transfer_s)

    def _bring(self, core: GenerationCore, member: GroupMember, call: GroupCall) -> float:
        """Receive from the group into the spare weights; returns the seconds of the transfer. Raises TransferBroken,
        WeightError."""
        start_s = time.monotonic()
        core.take_memory()
        manifest, payload = member.receive(call)
        transfer_s = time.monotonic() - start_s
        core.decoder.stage(tensors_of(manifest, payload), manifest.version)
        return transfer_s

    def _stage(self, core: GenerationCore, manifest_path: Path) -> int:
        start_s = self._tracer.now_s() if self._tracer else 0.0
        with torch.inference_mode(), during_generation(core.device):
            manifest, tensors = open_verified(manifest_path)
            core.take_memory()
            core.decoder.stage(tensors, manifest.version)
        if self._tracer:
            self._tracer.complete("stage", start_s, self._tracer.now_s(), "stager", version=manifest.version)
        return manifest.version

    # ------------------------------------------------------------------ engine thread

    def _serve(self) -> None:
        assert self._core is not None
        try:
            torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                while not self._is_closing:
                    self._turn(self._core)
                self._run_commands()
                self._core.cancel_all()
                self._hand_over(self._core)
        except BaseException as error:
            log.exception("the engine thread died")
            self._watch.close()
            self._fail(f"the engine thread died: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self._error = EngineError(reason)
        self._on_loop(partial(self._fail_pending, self._error))

    def _turn(self, core: GenerationCore) -> None:
        start_s = time.monotonic()
        self._watch.turn()
        self._run_commands()
        if self._swap is not None:
            core.is_admitting = self._swap.interruption != "drain"
            if core.is_admitting or not core.slots.num_running:
                self._perform(core, self._swap)
                start_s = time.monotonic()
        spent = "idle_s"
        if not self._is_paused:
            core.refill()
            if core.slots.count:
                core.step()
                spent = "busy_s"
        self._hand_over(core)
        if spent == "idle_s":
            self._wake.wait(REST_S)
            self._wake.clear()
        elapsed_s = time.monotonic() - start_s
        if self._is_paused:
            core.paused_s += elapsed_s
        else:
            self._spent_s[spent] += elapsed_s

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _perform(self, core: GenerationCore, swap: _Swap) -> None:
        self._swap = None
        start_s = time.monotonic()
        trace_s = self._tracer.now_s() if self._tracer else 0.0
        num_running = core.slots.num_running
        try:
            if swap.bring is not None:
                with self._watch.excused():
                    swap.transfer_s = swap.bring()
        except WeightError as error:
            core.is_admitting = True
            core.paused_s += time.monotonic() - start_s
            self._settle(swap.future, error)
            return
        core.swap(swap.version, swap.interruption)
        finish(core.device)
        core.is_admitting = True
        pause_s = time.monotonic() - start_s
        core.paused_s += pause_s
        if self._tracer:
            args: dict[str, Any] = {
                "version": swap.version, "interruption": swap.interruption, "running": num_running,
                "transfer_s": round(swap.transfer_s, 6),
            }  # fmt: skip
            self._tracer.complete("swap", trace_s, self._tracer.now_s(), "engine", **args)
        self._settle(swap.future, pause_s)

    def _hand_over(self, core: GenerationCore) -> None:
        ended = core.take_ended()
        if ended:
            self._on_loop(partial(self._deliver, ended))

    # ------------------------------------------------------------------ between the threads

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.warning("the event loop was closed before the engine")

    def _settle(self, future: asyncio.Future[Any], value: Any) -> None:
        def settle() -> None:
            if future.done():
                return
            if isinstance(value, WeightError):
                future.set_exception(value)
            else:
                future.set_result(value)

        self._on_loop(settle)

    def _deliver(self, ended: list[Ended]) -> None:
        for ticket, result in ended:
            future = self._futures.get(ticket)
            if future is None or future.done():
                continue
            if isinstance(result, EngineError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _control_future(self) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._control.add(future)
        future.add_done_callback(self._control.discard)
        return future

    def _fail_pending(self, error: EngineError) -> None:
        for future in (*self._futures.values(), *self._control):
            if not future.done():
                future.set_exception(error)

    def _check_alive(self) -> GenerationCore:
        if self._error is not None:
            raise self._error
        if self._core is None or self._is_closing:
            raise EngineError("the engine is closed" if self._is_closing else "the engine was not started")
        return self._core


def make(context: EngineContext) -> EmbeddedEngine:
    """The engine of one worker."""
    return EmbeddedEngine(
        context.model_dir, context.settings, dtype=context.dtype, num_threads=context.num_threads,
        tracer=context.tracer, starts_empty=context.starts_empty,
    )  # fmt: skip
