"""The emulated engine: implements the Engine protocol over a GPU that waits instead of computing.

It decides when answers start, end and change version, by a roofline and a batch that decodes at one rate. The cost of a
decode step is in areal_like/emulation/roofline.py, the batch in replica.py.

The emulated clock is `speedup` times as fast as the machine's. Events are processed in order at the emulated time at
which they were due, however late the timer is: when an answer ends, the next one starts at that time, so delays do not
add up. Requests and versions are processed at the time at which they arrived. Delays are counted.

The content and the length of an answer are in emulated_answer.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.emulation.device import EmulatedClock, Lateness, roofline_of, slots_of
from areal_like.emulation.replica import Replica, Sequence
from areal_like.emulation.settings import EmulationSettings
from areal_like.errors import EngineError
from areal_like.trajectory import Segment
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import open_payload, verify
from rollout.config import EngineSettings, Interruption
from rollout.engine.descriptor import EngineContext
from rollout.engine.emulated_answer import Answer, Planner, segment_of
from rollout.engine.port import (
    EndReason,
    EngineCapabilities,
    GenerationOutcome,
    GenerationRequest,
    LoadReport,
)
from rollout.engine.requests import check_request, ended_already

log = logging.getLogger(__name__)

ANY_TOKEN = 2**31 - 1
"""Vocabulary size without effect, because the model's vocabulary is not checked."""


@dataclass(eq=False)
class _Load:
    """A version that is being loaded."""

    version: int
    interruption: Interruption
    future: asyncio.Future[LoadReport]
    began_s: float
    due_s: float
    """Time at which it is staged, then at which it is swapped in; infinite while the engine drains."""
    phase: str = "stage"
    pause_s: float = 0.0


class EmulatedEngine:
    """The methods are specified in rollout/engine/port.py."""

    def __init__(
        self, emulation: EmulationSettings, settings: EngineSettings, *, max_new_tokens: int, seed: int
    ) -> None:
        """Raises UserError for an unknown GPU or model."""
        self._emulation, self._settings = emulation, settings
        self._costs = roofline_of(emulation, slots=settings.num_slots)
        self._planner = Planner(emulation, max_new_tokens=max_new_tokens, max_context=settings.max_context, seed=seed)
        num_slots = slots_of(emulation, self._costs, self._planner.lengths)
        self._num_slots = num_slots
        self._replica = Replica("engine", self._costs, num_slots)
        self._replica.is_admitting = False
        self._lateness = Lateness()
        self._answers: dict[Sequence, Answer] = {}
        self._prefilled: set[int] = set()
        """Prompts in the cache under the current weights."""
        self._load: _Load | None = None
        self._load_lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._counts = {"prefill_tokens": 0.0, "shared_prefill_tokens": 0.0, "swaps": 0.0}
        self._is_closed = False
        self._error: EngineError | None = None

    # ------------------------------------------------------------------ life

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; as many slots as the emulated memory holds."""
        return EngineCapabilities(
            num_slots=self._num_slots,
            max_context=self._settings.max_context,
            interruptions=("recompute", "keep_kv", "drain"),
            per_request_seed=True,
        )

    @property
    def version(self) -> int:
        """Version now used for sampling; -1 before the first load."""
        return self._replica.version

    async def start(self) -> None:
        """Start the clock."""
        self._loop = asyncio.get_running_loop()
        self._clock = EmulatedClock(self._loop.time(), self._emulation.speedup)

    async def close(self) -> None:
        """End running requests as `cancelled`. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for answer in list(self._answers.values()):
            self._end(answer, "cancelled", self._replica.now_s)
        if self._load is not None and not self._load.future.done():
            self._load.future.set_exception(EngineError("the engine was closed"))

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """See the port. Raises UserError (the request cannot fit), EngineError (the engine failed)."""
        self._check_alive()
        check_request(request, context=self._settings.max_context, vocab_size=ANY_TOKEN)
        if (outcome := ended_already(request)) is not None:
            return outcome
        if request.prefix.last_version > self.version >= 0:
            newest = request.prefix.last_version
            raise EngineError(
                f"the answer so far was sampled by version {newest}, which is newer than version "
                f"{self.version} of the engine"
            )
        self._advance()
        plan = self._planner.plan(request)
        if plan is None:
            return GenerationOutcome(request_id=request.request_id, segment=Segment.empty(), end_reason="stop")
        prompt, ready = self._emulation.prompt_tokens, len(request.prefix) * self._emulation.token_scale
        shared = prompt if request.share_key in self._prefilled else 0
        sequence = Sequence(0, prompt, (plan.emulated_tokens,), ready=ready, shared=shared)
        answer = Answer(request, sequence, plan.stop, plan.end_reason, self._loop.create_future(), self._replica.now_s)
        self._answers[answer.sequence] = answer
        self._replica.add(answer.sequence)
        self._start_and_schedule()
        try:
            return await answer.future
        except asyncio.CancelledError:
            self._advance()
            if self._answers.pop(answer.sequence, None) is not None and not self._is_closed:
                self._replica.remove(answer.sequence)
                self._start_and_schedule()
            raise

    def end_session(self, session_key: int) -> None:
        """Nothing is kept between turns: samples of emulated runs have one."""

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        self._advance()
        active = (self._answers[sequence] for sequence in self._replica.active if sequence in self._answers)
        return {answer.request.request_id: segment_of(answer, self._index(answer)) for answer in active}

    def counters(self) -> dict[str, float]:
        """Monotonic counters in real tokens and real seconds, and the delays of events."""
        self._advance()
        replica, scale, speedup = self._replica, self._emulation.token_scale, self._emulation.speedup
        return {
            **self._counts,
            "tokens": replica.tokens / scale,
            "steps": replica.steps / scale,
            "busy_s": (replica.busy_s + replica.prefill_s) / speedup,
            "idle_s": replica.idle_s / speedup,
            "paused_s": replica.paused_s / speedup,
            "emulated_prefill_s": replica.prefill_s / speedup,
            **self._lateness.counters(),
        }

    # ------------------------------------------------------------------ versions

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """See the port. The real payload is verified; the transfer of the emulated weights takes emulated time."""
        self._check_alive()
        return await asyncio.shield(self._loop.create_task(self._load_in_turn(manifest_path, interruption)))

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """Never called: `capabilities.group_ranks` is 0."""
        raise EngineError("an emulated engine cannot join a process group")

    async def release_memory(self) -> int:
        """Never called: validate refuses `placement: colocated` with emulation."""
        raise EngineError("an emulated engine has no memory to release")

    async def _load_in_turn(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        async with self._load_lock:
            self._check_alive()
            began_s = self._clock.emulated_s(self._loop.time())
            version = await asyncio.to_thread(_checked, manifest_path)
            self._check_alive()
            self._advance()
            future: asyncio.Future[LoadReport] = self._loop.create_future()
            due_s = max(self._replica.now_s, began_s + self._costs.stage_s())
            self._load = _Load(version, interruption, future, began_s, due_s)
            self._schedule()
            return await future

    def _change_version(self, now_s: float) -> None:
        """Advance the load to the current time."""
        load, replica = self._load, self._replica
        if load is None:
            return
        if load.phase == "stage" and now_s >= load.due_s:
            load.phase, load.due_s = "drain", math.inf
        if load.phase == "drain":
            if load.interruption == "drain":
                replica.is_admitting = False
                if replica.num_active:
                    return
            self._begin_swap(load, now_s)
        if load.phase == "swap" and now_s >= load.due_s:
            self._end_swap(load)

    def _begin_swap(self, load: _Load, now_s: float) -> None:
        for answer in self._running():
            newest = max(answer.request.prefix.last_version, segment_of(answer, self._index(answer)).last_version)
            if newest > load.version:
                self._replica.remove(answer.sequence)
                self._end(answer, "cancelled", now_s)
        is_recomputing = load.interruption == "recompute"
        refill_s = self._costs.prefill_s(self._replica.context_tokens) if is_recomputing else 0.0
        load.pause_s = self._costs.swap_s() + refill_s
        self._replica.swap(self._costs.swap_s(), is_recomputing=is_recomputing)
        load.phase, load.due_s = "swap", now_s + self._costs.swap_s()

    def _end_swap(self, load: _Load) -> None:
        replica, speedup = self._replica, self._emulation.speedup
        replica.version, replica.is_admitting, self._load = load.version, True, None
        self._prefilled.clear()
        self._counts["swaps"] += 1
        for answer in self._running():
            answer.spans.append((self._index(answer), load.version))
        if not load.future.done():
            stage_s = (load.due_s - self._costs.swap_s() - load.began_s) / speedup
            load.future.set_result(LoadReport(version=load.version, stage_s=stage_s, pause_s=load.pause_s / speedup))

    # ------------------------------------------------------------------ time

    def _advance(self) -> None:
        """Process all events that are due, each at its own time, and advance the batch to now."""
        if self._is_closed:
            return
        real_s = self._loop.time()
        now_s = max(self._clock.emulated_s(real_s), self._replica.now_s)
        while (due_s := self._due_s()) <= now_s:
            self._lateness.add(real_s - self._clock.monotonic_s(due_s))
            self._step_to(max(due_s, self._replica.now_s))
        self._replica.advance(now_s)

    def _due_s(self) -> float:
        return min(self._replica.wake_s, self._load.due_s if self._load else math.inf)

    def _step_to(self, now_s: float) -> None:
        self._replica.advance(now_s)
        for sequence in self._replica.take_ended():
            answer = self._answers.get(sequence)
            if answer is not None:
                self._end(answer, answer.end_reason, now_s)
        self._change_version(now_s)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Fill free slots, and compute the time of the next decode step."""
        scale = self._emulation.token_scale
        for sequence in self._replica.refill():
            answer = self._answers[sequence]
            request = answer.request
            answer.started_s, answer.paused_before_s = self._replica.now_s, self._replica.paused_s
            answer.spans = [(len(request.prefix), max(self.version, 0))]
            self._counts["prefill_tokens"] += (sequence.prompt - sequence.shared + sequence.ready) / scale
            self._counts["shared_prefill_tokens"] += sequence.shared / scale
            if request.share_key >= 0:
                self._prefilled.add(request.share_key)

    def _start_and_schedule(self) -> None:
        """Start waiting answers and set the timer, after a request or version was added or removed."""
        self._change_version(self._replica.now_s)
        self._start_waiting()
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._due_s()
        if due_s < math.inf and not self._is_closed:
            self._timer = self._loop.call_at(self._clock.monotonic_s(due_s), self._wake)

    def _wake(self) -> None:
        """The fault boundary of the timer: an error here ends every request, present and future."""
        try:
            self._advance()
            self._schedule()
        except Exception as error:
            log.exception("the emulated engine failed")
            self._error = EngineError(f"the emulated engine failed: {type(error).__name__}: {error}")
            waiting: list[asyncio.Future[Any]] = [answer.future for answer in self._answers.values()]
            waiting += [self._load.future] if self._load else []
            for future in waiting:
                if not future.done():
                    future.set_exception(self._error)

    # ------------------------------------------------------------------ answers

    def _running(self) -> list[Answer]:
        return [self._answers[sequence] for sequence in self._replica.active if sequence in self._answers]

    def _index(self, answer: Answer) -> int:
        """Number of real tokens that the answer has so far."""
        return int(self._replica.tokens_of(answer.sequence) / self._emulation.token_scale + 1e-9)

    def _end(self, answer: Answer, reason: EndReason, now_s: float) -> None:
        del self._answers[answer.sequence]
        if answer.future.done():
            return
        has_started = answer.has_started
        stop = answer.stop if reason != "cancelled" else self._index(answer)
        started_s = answer.started_s if has_started else now_s
        paused_s = self._replica.paused_s - answer.paused_before_s if has_started else 0.0
        speedup = self._emulation.speedup
        outcome = GenerationOutcome(
            request_id=answer.request.request_id,
            segment=segment_of(answer, stop) if has_started else Segment.empty(),
            end_reason=reason,
            paused_s=paused_s / speedup,
            queue_s=(started_s - answer.submitted_s) / speedup,
            generate_s=max(now_s - started_s - paused_s, 0.0) / speedup,
        )
        answer.future.set_result(outcome)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise EngineError("the engine is closed")


def _checked(manifest_path: Path) -> int:
    """Verify a payload's checksums and return its version. Raises WeightError."""
    manifest, payload = open_payload(manifest_path)
    verify(manifest, payload)
    return manifest.version


def make(context: EngineContext) -> EmulatedEngine:
    """The engine of one worker."""
    assert context.emulation is not None, "chosen by that section"
    return EmulatedEngine(context.emulation, context.settings, max_new_tokens=context.max_new_tokens, seed=context.seed)
