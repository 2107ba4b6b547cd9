"""The SGLang engine: the Engine port over one server that we launch and keep alive, or attach to.

Owns: requests and their attempts, the gate, the swap in each of the three modes. Refuses: processes (process.py,
keeper.py), HTTP (client.py), laying a version out on disk (staging.py).

Map of tasks, all on the worker's loop
  generate (one per request)   waits: a slot, the gate, a server, events of its stream   woken by: those
  load_version                 waits: staging (a thread), the load lock, the server       opens and closes the gate
  watch (keeper)               the clock                                                  ends and starts servers
One request is as many attempts as it takes: an attempt that breaks off (the server died, or was replaced) is followed
by another that hands the server prompt plus all tokens so far. Tokens of an answer are therefore sampled once each,
whatever happens to servers.

The gate is closed while a version is swapped in, so that no attempt begins between a pause and the new weights. Prefix
caches are told apart by `extra_key`, which changes with every swap: with `keep_kv` nothing is flushed, and keys and
values of old weights stay with the requests that made them. An attempt whose first token carries another version than
the gate showed was overtaken by the swap; with `keep_kv` it may have used an old prefix, and is thrown away and made
again. With `recompute` and `drain` the whole cache is flushed inside the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.errors import EngineError, UserError, WeightError
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from rollout.config import EngineSettings
from rollout.engine.port import (
    EndReason,
    EngineCapabilities,
    GenerationOutcome,
    GenerationRequest,
    Interruption,
    LoadReport,
)
from rollout.engine.requests import check_request, ended_already
from rollout.engine.sglang.answer import Finish, GrowingAnswer, StreamEvent
from rollout.engine.sglang.arguments import Launch, plan_launch
from rollout.engine.sglang.attach import check_attached
from rollout.engine.sglang.client import PauseMode, ServerGone, ServerRefused, SGLangClient
from rollout.engine.sglang.environment import argument_table, check_version, find_python
from rollout.engine.sglang.keeper import Home, Live, ServerKeeper
from rollout.engine.sglang.meter import Meter
from rollout.engine.sglang.staging import StagedVersion, Stager
from rollout.engine.shape import read_config

log = logging.getLogger(__name__)

MAX_BARREN_ATTEMPTS = 5
"""Attempts in a row that bring an answer no token: then the server, or the request, is at fault."""
BARREN_WAIT_S = 0.5


@dataclass
class _Running:
    """A request and what it has so far."""

    request: GenerationRequest
    answer: GrowingAnswer = field(default_factory=GrowingAnswer)
    ticket: str = ""
    is_streaming: bool = False
    is_void: bool = False
    """It has tokens of versions newer than the one swapped in: it ends as `cancelled`."""
    barren: int = 0


@dataclass(frozen=True)
class Whereabouts:
    """Where an engine keeps things. `name` tells workers of a run apart."""

    name: str
    log_path: Path
    seed: int


class SGLangEngine:
    """One SGLang server behind the Engine port; see rollout/engine/port.py for what the methods promise."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        dtype: str,
        num_threads: int,
        interruption: Interruption,
        whereabouts: Whereabouts,
        attach: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`interruption` is the one loads will come with: the scheduler depends on it. `attach`: a server's address."""
        self._model_dir, self._settings, self._tracer = model_dir, settings, tracer
        self._dtype, self._num_threads, self._interruption = settings.dtype or dtype, num_threads, interruption
        self._where, self._attach = whereabouts, attach
        self._stager = Stager(model_dir, whereabouts.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stager")
        self._slots = asyncio.Semaphore(settings.num_slots + max(1, settings.num_slots // 8))
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_lock = asyncio.Lock()
        self._running: dict[int, _Running] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._meter = Meter()
        self._keeper: ServerKeeper | None = None
        self._current: StagedVersion | None = None
        self._version = -1
        self._num_swaps = self._num_corrected = 0
        self._num_tickets = 0
        self._num_streaming = 0
        self._is_paused = False
        self._context, self._vocab_size = settings.max_context, 0

    # ------------------------------------------------------------------ life

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; the context is the smaller of the setting and the model's (known after `start`)."""
        return EngineCapabilities(
            num_slots=self._settings.num_slots,
            max_context=self._context,
            interruptions=("recompute", "keep_kv", "drain"),
            per_request_seed=False,
        )

    @property
    def version(self) -> int:
        """Version now used for sampling; -1 before the first load."""
        return self._version

    async def start(self) -> None:
        """Check environment and arguments, and bring the server up. Raises UserError, EngineError."""
        config = await asyncio.to_thread(read_config, self._model_dir)
        self._vocab_size = int(config.get_text_config().vocab_size)
        if not config.architectures:
            what = "config.json names no `architectures`, and SGLang chooses the model's code by them"
            raise UserError(
                what, where=str(self._model_dir), remedy="save the model with transformers' save_pretrained"
            )
        self._context = min(self._context, getattr(config, "max_position_embeddings", None) or self._context)
        launch = None if self._attach else await asyncio.to_thread(self._plan)
        if self._attach:
            await check_attached(self._attach, self._settings, self._interruption, self._model_dir, self._context)
        self._keeper = ServerKeeper(
            self._settings.sglang,
            Home(self._model_dir, -1),
            launch=launch,
            url=self._attach,
            seed=self._where.seed,
            log_path=self._where.log_path,
            stalled_s=self._meter.stalled_s,
        )
        started_s = time.monotonic()
        await self._keeper.start()
        log.info("the SGLang server is ready after %.1f s", time.monotonic() - started_s)

    def _plan(self) -> Launch:
        python = find_python(self._settings.python)
        found = check_version(python)
        log.info("SGLang %s, torch %s in %s", found.get("sglang"), found.get("torch"), python.parents[1])
        return plan_launch(
            python,
            self._settings,
            argument_table(python, is_cpu=self._settings.device == "cpu"),
            dtype=self._dtype,
            context=self._context,
            num_threads=self._num_threads,
            interruption=self._interruption,
        )

    async def close(self) -> None:
        """End the server and everything that waits for it. Safe to call twice."""
        for task in list(self._background):
            task.cancel()
        if self._keeper is not None:
            await self._keeper.close()
        self._gate.set()
        self._thread.shutdown(wait=False)
        if self._current is not None:
            self._stager.drop(self._current)
            self._current = None

    def counters(self) -> dict[str, float]:
        """Monotonic: tokens, prefill_tokens, cached_tokens, swaps, server_restarts; busy_s, idle_s, paused_s."""
        restarts = self._keeper.num_restarts if self._keeper else 0
        return {
            **self._meter.counters(),
            "swaps": float(self._num_swaps),
            "server_restarts": float(restarts),
            "corrected_tokens": float(self._num_corrected),
        }

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """See the port. Raises UserError (the request cannot fit), EngineError (no server any more)."""
        self._check_started()
        check_request(request, context=self._context, vocab_size=self._vocab_size)
        if (outcome := ended_already(request)) is not None:
            return outcome
        running = self._running[request.request_id] = _Running(request)
        asked_s, paused_s = time.monotonic(), self._meter.paused_s
        try:
            async with self._slots:
                began_s = time.monotonic()
                end_reason: EndReason | None = None
                while end_reason is None:
                    end_reason = "cancelled" if running.is_void else await self._attempt(running)
            return GenerationOutcome(
                request_id=request.request_id,
                segment=running.answer.segment,
                end_reason=end_reason,
                queue_s=began_s - asked_s,
                generate_s=time.monotonic() - began_s,
                paused_s=self._meter.paused_s - paused_s,
            )
        finally:
            del self._running[request.request_id]

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        return {request_id: running.answer.segment for request_id, running in self._running.items()}

    async def _attempt(self, running: _Running) -> EndReason | None:
        """One request to the server, from the tokens so far. How the answer ended, or None: it must go on."""
        live = await self._admitted()
        if running.is_void:
            return "cancelled"
        answer, before = running.answer, len(running.answer)
        self._num_tickets += 1
        running.ticket = f"{self._where.name}-{self._num_tickets}"
        answer.begin_attempt(self._version)
        expected = self._version if self._interruption == "keep_kv" else None
        self._streams(running, True)
        finish: Finish | None = None
        try:
            events = live.client.stream(self._body(running))
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.error is not None:
                        raise ServerRefused("/generate", 200, bytes(event.error).decode(errors="replace"))
                    if running.is_void or (expected is not None and _is_overtaken(event, expected)):
                        self._spawn_abort(live.client, running.ticket)
                        return "cancelled" if running.is_void else None
                    expected = None if event.output_ids else expected
                    self._take(running, event, live)
                    finish = event.meta_info.finish_reason
        except asyncio.CancelledError:
            self._spawn_abort(live.client, running.ticket)
            raise
        except ServerGone as error:
            self._streams(running, False)
            await self._after_break(running, live, before, str(error))
            return None
        except ServerRefused as error:
            raise EngineError(f"the server refuses a request it should take: {error}") from error
        finally:
            self._streams(running, False)
        return await self._end_of(running, finish, before)

    async def _admitted(self) -> Live:
        """A server, at a moment when the gate is open: no await may follow before the request is made."""
        keeper = self._check_started()
        while True:
            await self._gate.wait()
            live = await keeper.ready()
            if self._gate.is_set() and keeper.live is live:
                return live

    def _body(self, running: _Running) -> dict[str, Any]:
        request, answer = running.request, running.answer
        sampling = request.sampling
        ids = [*request.prompt_P.tolist(), *request.prefix.tokens_R.tolist(), *answer.segment.tokens_R.tolist()]
        left = min(
            sampling.max_new_tokens - len(request.prefix), self._context - len(request.prompt_P) - len(request.prefix)
        )
        if request.segment_tokens:
            left = min(left, request.segment_tokens)
        return {
            "rid": running.ticket,
            "input_ids": ids,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "max_new_tokens": left - len(answer),
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            "return_logprob": True,
            "stream": True,
            "extra_key": str(self._num_swaps),
        }

    def _take(self, running: _Running, event: StreamEvent, live: Live) -> None:
        is_first = running.answer.is_attempt_empty
        count = running.answer.take(event, is_incremental=live.is_incremental)
        if running.answer.num_corrected:
            log.warning("%s: %d tokens were stamped anew by the server", running.ticket, running.answer.num_corrected)
            self._num_corrected += running.answer.num_corrected
            running.answer.num_corrected = 0
        self._meter.came(count, event.meta_info if is_first and count else None)

    async def _end_of(self, running: _Running, finish: Finish | None, before: int) -> EndReason | None:
        """What the server's reason means for the whole answer."""
        request, answer = running.request, running.answer
        total = len(request.prefix) + len(answer)
        if finish is not None and finish.type == "stop" and answer.last_token in request.sampling.stop_token_ids:
            return "stop"
        if total >= request.sampling.max_new_tokens or len(request.prompt_P) + total >= self._context:
            return "length"
        if request.segment_tokens and len(answer) >= request.segment_tokens:
            return "segment"
        if running.is_void:
            return "cancelled"
        if finish is not None and finish.type == "abort" and len(answer) > before:
            log.info("the server gave up %s after %d tokens: %s", running.ticket, len(answer) - before, finish.message)
            return "cancelled"  # what it has goes on elsewhere
        # Everything else is no end of ours: the model's own end-of-sequence id where it is no stop id, or a server that
        # could not go on for want of memory.
        await self._count_barren(running, before, f"{finish.type}: {finish.message}" if finish else "no reason given")
        return None

    async def _after_break(self, running: _Running, live: Live, before: int, words: str) -> None:
        await self._count_barren(running, before, words)
        await self._check_started().settle(live.epoch, words)

    async def _count_barren(self, running: _Running, before: int, words: str) -> None:
        running.barren = 0 if len(running.answer) > before else running.barren + 1
        if running.barren >= MAX_BARREN_ATTEMPTS:
            raise EngineError(
                f"{MAX_BARREN_ATTEMPTS} attempts brought an answer no token; the last ended with: {words}"
            )
        if running.barren:
            await asyncio.sleep(BARREN_WAIT_S)

    def _streams(self, running: _Running, is_streaming: bool) -> None:
        if running.is_streaming == is_streaming:
            return
        running.is_streaming = is_streaming
        self._num_streaming += 1 if is_streaming else -1
        self._meter.works(self._num_streaming > 0)
        if self._num_streaming:
            self._idle.clear()
        else:
            self._idle.set()

    def _spawn_abort(self, client: SGLangClient, ticket: str) -> None:
        """Free the slot on the server without waiting for it; a server that is gone needs no telling."""

        async def abort() -> None:
            with contextlib.suppress(ServerGone, ServerRefused):
                await client.abort(ticket)

        task = asyncio.create_task(abort(), name=f"abort-{ticket}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ------------------------------------------------------------------ pause

    async def pause(self) -> None:
        """Stop at the next token boundary."""
        keeper = self._check_started()
        async with self._load_lock:
            self._is_paused = True
            self._gate.clear()
            self._meter.pauses(True)
            await (await keeper.ready()).client.pause("in_place")

    async def resume(self) -> None:
        """Go on."""
        keeper = self._check_started()
        async with self._load_lock:
            self._is_paused = False
            await (await keeper.ready()).client.resume()
            self._meter.pauses(False)
            self._gate.set()

    # ------------------------------------------------------------------ versions

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """See the port. Loads are done in the order they are asked for; cancelling the caller does not undo one."""
        self._check_started()
        if interruption == "keep_kv" and self._interruption != "keep_kv":
            raise EngineError("this server's scheduler was not chosen for keep_kv")
        task = asyncio.create_task(self._load(manifest_path, interruption), name="sglang-load")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    async def _load(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            start_s, trace_s = time.monotonic(), self._now_s()
            staged = await asyncio.get_running_loop().run_in_executor(self._thread, self._stager.stage, manifest_path)
            stage_s = time.monotonic() - start_s
            self._trace("stage", trace_s, "stager", version=staged.version)
            self._gate.clear()
            try:
                if interruption == "drain":
                    await self._drained()
                pause_s = await self._swap(staged, interruption)
            except BaseException:
                self._stager.drop(staged)
                raise
            finally:
                self._gate.set() if not self._is_paused else None
        return LoadReport(version=staged.version, stage_s=stage_s, pause_s=pause_s)

    async def _drained(self) -> None:
        """All attempts have ended; a server that hangs meanwhile is replaced, which ends them too."""
        while self._num_streaming:
            await self._idle.wait()

    async def _swap(self, staged: StagedVersion, interruption: Interruption) -> float:
        """Replace the weights at a token boundary; the pause in seconds. A server that dies meanwhile is replaced, and
        the swap is made on its successor. Raises WeightError: the old version stays in use.
        """
        keeper = self._check_started()
        num_running = self._num_streaming
        while True:
            live = await keeper.ready()
            start_s, trace_s = time.monotonic(), self._now_s()
            self._meter.pauses(True)
            try:
                if staged.version < self._version:
                    self._void_newer_than(staged.version, live.client)
                await self._exchange(live.client, staged, interruption)
                break
            except ServerGone as error:
                await keeper.settle(live.epoch, str(error))
            except ServerRefused as error:
                log.warning("version %d was refused, which may have left the server with half of it", staged.version)
                await keeper.replace(live.epoch, f"it refused version {staged.version}")
                raise WeightError(f"SGLang cannot load version {staged.version}: {error.text[:400]}") from error
            finally:
                self._meter.pauses(self._is_paused)
        pause_s = time.monotonic() - start_s
        args = {"version": staged.version, "interruption": interruption, "running": num_running}
        self._trace("swap", trace_s, "engine", **args)
        return pause_s

    async def _exchange(self, client: SGLangClient, staged: StagedVersion, interruption: Interruption) -> None:
        mode: PauseMode = "in_place" if interruption == "keep_kv" else "retract"
        await client.pause(mode)
        await client.load(str(staged.folder), staged.version, flush_cache=interruption != "keep_kv")
        keeper = self._check_started()
        keeper.home = Home(staged.folder, staged.version)
        old, self._current, self._version = self._current, staged, staged.version
        self._num_swaps += 1
        if old is not None and old is not staged:  # the same one again where a server died between load and resume
            self._thread.submit(self._stager.drop, old)
        if not self._is_paused:
            await client.resume()

    def _void_newer_than(self, version: int, client: SGLangClient) -> None:
        """A rollback: answers with tokens of abandoned versions end as they are (law 5)."""
        for running in self._running.values():
            if max(running.answer.last_version, running.request.prefix.last_version) > version:
                running.is_void = True
                if running.is_streaming:
                    self._spawn_abort(client, running.ticket)

    # ------------------------------------------------------------------ small parts

    def _check_started(self) -> ServerKeeper:
        if self._keeper is None:
            raise EngineError("the engine was not started")
        return self._keeper

    def _now_s(self) -> float:
        return self._tracer.now_s() if self._tracer else 0.0

    def _trace(self, name: str, start_s: float, lane: str, **args: object) -> None:
        if self._tracer:
            self._tracer.complete(name, start_s, self._tracer.now_s(), lane, **args)


def _is_overtaken(event: StreamEvent, expected: int) -> bool:
    """The first token of an attempt was sampled under another version than the gate showed."""
    meta = event.meta_info
    first = meta.weight_versions[0].version if meta.weight_versions else meta.weight_version
    return bool(event.output_ids) and first != str(expected)
