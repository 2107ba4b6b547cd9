"""Running answers on one server: requests, their attempts, and the gate that closes during swaps.

Versions and pauses are in engine.py, the server's process in keeper.py, the growth of an answer in answer.py.

A request may need several attempts: after an attempt that breaks off (the server died, or was replaced) another one
sends the prompt and all tokens so far. So each visible token is sampled once, whatever happens to servers; tokens whose
version was not confirmed when an attempt broke off are dropped, counted (`num_dropped`), and sampled again.

The gate is closed while a version is swapped in, so that no attempt begins between a pause and the new weights. If
nothing of the old weights is kept (`recompute`), a swap also ends the running attempts (`end_attempts`): their last
events contain the spans that confirm their versions, and each attempt is within one version. An attempt that a swap
could not end, or that keeps its keys and values (`keep_kv`), is notified of new weights, and hides its tokens from then
on until its end (answer.py).

Prefix caches are distinguished by `AnswerRequest.prefix_key`, which changes with every swap: with `keep_kv` nothing is
flushed, and keys and values of old weights stay with the requests that computed them. If the first token of an attempt
has another version than the one at the gate, a swap happened in between; with `keep_kv` the attempt may have used an
old prefix, and is discarded and repeated. With `recompute` and `drain` the whole cache is flushed inside the pause.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np

from areal_like.errors import EngineError
from areal_like.trajectory import Segment
from rollout.engine.port import EndReason, GenerationOutcome, GenerationRequest
from rollout.engine.requests import check_request, ended_already
from rollout.engine.server.answer import Finish, GrowingAnswer, StreamEvent
from rollout.engine.server.http import ServerGone, ServerRefused
from rollout.engine.server.keeper import RunningServer, ServerKeeper
from rollout.engine.server.kind import AnswerRequest, ClientT
from rollout.engine.server.meter import Meter

log = logging.getLogger(__name__)

MAX_FRUITLESS_ATTEMPTS = 5
"""Number of consecutive attempts without a new token after which the answer fails: the server or the request is at
fault."""
FRUITLESS_WAIT_S = 0.5
ABORT_AGAIN_S = 0.05
"""Interval between aborts: a request that was in transit when the first abort arrived is not affected by it."""


@dataclass
class _Running:
    """A request and its tokens so far."""

    request: GenerationRequest
    answer: GrowingAnswer = field(default_factory=GrowingAnswer)
    ticket: str = ""
    is_streaming: bool = False
    is_prompt_counted: bool = False
    """The server has reported the tokens of its attempt's prompt."""
    is_ended_by_us: bool = False
    """Its attempt was ended for a swap, and another one follows."""
    is_stopped: bool = False
    """The last token completed a stop string."""
    is_void: bool = False
    """It has tokens of versions newer than the one swapped in: it ends as `cancelled`."""
    consecutive_failures: int = 0
    routed_experts: tuple[int, str] | None = None
    """The server's last report for every position of that attempt, and the length of the answer then."""


class Attempts(Generic[ClientT]):
    """All answers of one engine. The engine changes `version`, `prefix_key` and the gate in a swap."""

    def __init__(
        self,
        keeper: ServerKeeper[ClientT],
        meter: Meter,
        *,
        name: str,
        num_slots: int,
        context: int,
        vocab_size: int,
        keeps_kv: bool,
        body: Callable[[AnswerRequest], dict[str, Any]],
        experts_shape: tuple[int, int] | None = None,
    ) -> None:
        """`keeps_kv`: swaps may leave old keys and values on the server. `body`: a request as the server expects it.
        `experts_shape`: layers and experts per token, if the server should report the experts that were used.
        """
        self._keeper, self.meter, self._name, self._keeps_kv = keeper, meter, name, keeps_kv
        self.context, self.vocab_size = context, vocab_size
        self._make_body, self._experts_shape = body, experts_shape
        self.on_request: Callable[[], None] = lambda: None
        """Called when a request arrives."""
        self.version = -1
        self.prefix_key = 0
        """Prefixes are shared among requests with equal keys."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.proven = asyncio.Event()
        """Events of the server are looked at. While a new version is not verified yet, they wait."""
        self.proven.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_streaming = self.num_dropped = 0
        # A few more than the server runs at once, so that a slot need not wait for the transfer of the next request.
        self._slots = asyncio.Semaphore(num_slots + max(1, num_slots // 8))
        self._running: dict[int, _Running] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._num_tickets = 0

    def close(self) -> None:
        """Wake the requests that wait at the gate; they fail because there is no server."""
        for task in list(self._background):
            task.cancel()
        self.gate.set()

    @property
    def num_open(self) -> int:
        """Number of requests that run or wait."""
        return len(self._running)

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """Generate one answer, with several attempts if necessary. Raises UserError (it does not fit), EngineError (no
        server)."""
        check_request(request, context=self.context, vocab_size=self.vocab_size)
        if (outcome := ended_already(request)) is not None:
            return outcome
        running = self._running[request.request_id] = _Running(request)
        self.on_request()
        asked_s, paused_s = time.monotonic(), self.meter.paused_s
        try:
            async with self._slots:
                began_s = time.monotonic()
                end_reason: EndReason | None = None
                while end_reason is None:  # an answer may break off at its last token, so check before each attempt
                    end_reason = self._reached(running) or await self._attempt(running)
            return GenerationOutcome(
                request_id=request.request_id,
                segment=running.answer.segment,
                end_reason=end_reason,
                queue_s=began_s - asked_s,
                generate_s=time.monotonic() - began_s,
                paused_s=self.meter.paused_s - paused_s,
                routed_experts=self._experts_of(running),
            )
        finally:
            del self._running[request.request_id]

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far."""
        return {request_id: running.answer.segment for request_id, running in self._running.items()}

    async def _attempt(self, running: _Running) -> EndReason | None:
        """Send one request to the server, from the tokens so far. Returns how the answer ended, or None if it
        continues."""
        live = await self._admitted(running)
        if live is None or running.is_void:
            return "cancelled"
        answer, before = running.answer, len(running.answer)
        self._num_tickets += 1
        running.ticket = f"{self._name}-{self._num_tickets}"
        running.is_ended_by_us = running.is_prompt_counted = False
        answer.begin_attempt(self.version)
        expected = self.version if self._keeps_kv else None
        self._streams(running, True)
        finish: Finish | None = None
        try:
            events = live.client.stream(self._body(running))
            async with contextlib.aclosing(events):
                async for event in events:
                    await self._proved(live)
                    if event.error is not None:
                        raise ServerRefused("a generation request", 200, bytes(event.error).decode(errors="replace"))
                    if running.is_void or (expected is not None and _is_overtaken(event, expected)):
                        self._spawn_abort(live.client, running.ticket)
                        self.num_dropped += len(event.output_ids)
                        return "cancelled" if running.is_void else None
                    expected = None if event.output_ids else expected
                    self._take(running, event, live)
                    finish = event.meta_info.finish_reason
                    if running.is_stopped:
                        if finish is None:
                            self._spawn_abort(live.client, running.ticket)
                        return None
        except asyncio.CancelledError:
            self._spawn_abort(live.client, running.ticket)
            raise
        except ServerGone as error:
            self._streams(running, False)
            await self._after_break(running, live, before, str(error))
            return None
        except ServerRefused as error:
            raise EngineError(f"the server rejected a valid request: {error}") from error
        finally:
            self._streams(running, False)
            self.num_dropped += answer.drop_hidden()
        return await self._end_of(running, finish, before)

    async def _proved(self, live: RunningServer[ClientT]) -> None:
        """Return once the weights of the server are verified. Raises ServerGone if they are not what they should be:
        the server has been replaced."""
        if not self.proven.is_set():
            await self.proven.wait()
            if self._keeper.live is not live:
                raise ServerGone("the server was replaced before its weights were verified")

    async def _admitted(self, running: _Running) -> RunningServer[ClientT] | None:
        """Wait for a server while the gate is open; no await may follow before the request is sent. None: the request
        has been ended.
        """
        while True:
            if not running.is_void:
                await self.gate.wait()
            if running.is_void:
                return None
            live = await self._keeper.ready()
            if self.gate.is_set() and self._keeper.live is live:
                return live

    def _body(self, running: _Running) -> dict[str, Any]:
        request, answer = running.request, running.answer
        sampling = request.sampling
        ids = [*request.prompt_P.tolist(), *request.prefix.tokens_R.tolist(), *answer.segment.tokens_R.tolist()]
        left = min(
            sampling.max_new_tokens - len(request.prefix), self.context - len(request.prompt_P) - len(request.prefix)
        )
        if request.segment_tokens:
            left = min(left, request.segment_tokens)
        return self._make_body(
            AnswerRequest(
                ticket=running.ticket,
                tokens=ids,
                max_new_tokens=left - len(answer),
                sampling=sampling,
                seed=request.seed,
                prefix_key=str(self.prefix_key),
            )
        )

    def _take(self, running: _Running, event: StreamEvent, live: RunningServer[ClientT]) -> None:
        num_shown, meta = len(running.answer), event.meta_info
        count = running.answer.take(event, is_incremental=live.is_incremental)
        is_counted = running.is_prompt_counted or not meta.prompt_tokens or running.answer.is_attempt_empty
        running.is_prompt_counted |= not is_counted
        self.meter.add_tokens(count, None if is_counted else meta)
        self._look_for_stop_string(running, num_shown)
        if event.meta_info.routed_experts is not None:
            running.routed_experts = len(running.answer), event.meta_info.routed_experts

    def _look_for_stop_string(self, running: _Running, num_seen: int) -> None:
        """End the answer with the first token after `num_seen` new ones that completes a stop string. The server has
        no tokenizer, and looks at the tokens of one attempt only."""
        request, answer = running.request, running.answer
        if request.stops is None or len(answer) == num_seen:
            return
        before = max(0, num_seen - request.stops.num_tokens)
        tokens_R = answer.segment.tokens_R[before:]
        if num_seen < request.stops.num_tokens:
            tokens_R = np.concatenate((request.prefix.tokens_R, tokens_R))
            before -= len(request.prefix)
        length = request.stops.end(tokens_R, num_seen - before)
        if length is not None:
            running.is_stopped = True
            self.num_dropped += answer.cut(before + length)

    def _experts_of(self, running: _Running) -> np.ndarray | None:
        """int32 [positions, layers, experts per token]; None if a server died before it reported them. Raises
        EngineError for another shape.
        """
        reported_at, encoded = running.routed_experts or (-1, "")
        if self._experts_shape is None or reported_at != len(running.answer):
            return None
        request = running.request
        positions = len(request.prompt_P) + len(request.prefix) + len(running.answer) - 1
        flat = np.frombuffer(base64.b64decode(encoded), np.int32)
        if flat.size != positions * math.prod(self._experts_shape):
            raise EngineError(
                f"the server sent {flat.size} routed expert ids, but an array of shape "
                f"{self._experts_shape} was expected "
                f"for each of {positions} positions"
            )
        return flat.reshape(positions, *self._experts_shape)

    async def _end_of(self, running: _Running, finish: Finish | None, before: int) -> EndReason | None:
        """The end reason of the whole answer for the server's reason; None: it continues, or has reached its end."""
        answer = running.answer
        if self._reached(running) is not None or running.is_ended_by_us:
            return None
        if finish is not None and finish.type == "abort" and len(answer) > before:
            log.info(
                "the server aborted answer %s after %d tokens: %s", running.ticket, len(answer) - before, finish.message
            )
            return "cancelled"  # it continues on another worker
        # Other reasons do not end the answer: the model's end-of-sequence id if it is not a stop id, or a server that #
        # ran out of memory.
        await self._count_fruitless(
            running, before, f"{finish.type}: {finish.message}" if finish else "no reason given"
        )
        return None

    def _reached(self, running: _Running) -> EndReason | None:
        """The end reason that the answer's tokens imply, whatever the server reports."""
        request, answer = running.request, running.answer
        total = len(request.prefix) + len(answer)
        if running.is_stopped or (len(answer) and answer.last_token in request.sampling.stop_token_ids):
            return "stop"
        if total >= request.sampling.max_new_tokens or len(request.prompt_P) + total >= self.context:
            return "length"
        if request.segment_tokens and len(answer) >= request.segment_tokens:
            return "segment"
        return "cancelled" if running.is_void else None

    async def _after_break(self, running: _Running, live: RunningServer[ClientT], before: int, words: str) -> None:
        if running.is_void:
            return  # it ends, so the state of the server does not matter
        await self._count_fruitless(running, before, words)
        await self._keeper.settle(live.epoch, words)

    async def _count_fruitless(self, running: _Running, before: int, words: str) -> None:
        running.consecutive_failures = 0 if len(running.answer) > before else running.consecutive_failures + 1
        if running.consecutive_failures >= MAX_FRUITLESS_ATTEMPTS:
            raise EngineError(
                f"{MAX_FRUITLESS_ATTEMPTS} attempts produced no token for an answer; the last attempt ended with: "
                f"{words}"
            )
        if running.consecutive_failures:
            await asyncio.sleep(FRUITLESS_WAIT_S)

    def _streams(self, running: _Running, is_streaming: bool) -> None:
        if running.is_streaming == is_streaming:
            return
        running.is_streaming = is_streaming
        self.num_streaming += 1 if is_streaming else -1
        self.meter.set_busy(self.num_streaming > 0)
        if self.num_streaming:
            self.idle.clear()
        else:
            self.idle.set()

    def _spawn_abort(self, client: ClientT, ticket: str) -> None:
        """Free the slot on the server without waiting for it; errors of a server that has exited are ignored."""

        async def abort() -> None:
            with contextlib.suppress(ServerGone, ServerRefused):
                await client.abort(ticket)

        task = asyncio.create_task(abort(), name=f"abort-{ticket}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def end_attempts(self, client: ClientT, limit_s: float) -> None:
        """End the running attempts, so that the versions of their tokens are known before the weights change. The gate
        is closed; once it opens, answers continue in other attempts. Attempts that have not ended after `limit_s` are
        left running. Raises ServerGone, ServerRefused.
        """
        deadline_s = time.monotonic() + limit_s
        while self.num_streaming and (left_s := deadline_s - time.monotonic()) > 0:
            for running in self._streaming():
                running.is_ended_by_us = True
            await client.abort_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ABORT_AGAIN_S, left_s)):
                    await self.idle.wait()

    def weights_change(self) -> None:
        """Notify the running attempts that other weights will be sent to the server."""
        for running in self._streaming():
            running.answer.weights_change()

    def _streaming(self) -> list[_Running]:
        return [running for running in self._running.values() if running.is_streaming]

    def void_newer_than(self, version: int, client: ClientT) -> None:
        """End answers with tokens of abandoned versions, after a rollback (`stamped-versions`)."""
        for running in self._running.values():
            if max(running.answer.newest_version, running.request.prefix.last_version) > version:
                running.is_void = True
                if running.is_streaming:
                    self._spawn_abort(client, running.ticket)

    def end_all(self) -> None:
        """End every request as `cancelled` with the tokens it has: those at the closed gate now, and those on the
        server at its next event or when it is paused with `abort`.
        """
        for running in self._running.values():
            running.is_void = True
        self.gate.set()  # wakes the requests that wait there
        self.gate.clear()


def _is_overtaken(event: StreamEvent, expected: int) -> bool:
    """Whether the first token of an attempt was sampled with another version than the one at the gate."""
    meta = event.meta_info
    first = meta.weight_versions[0].version if meta.weight_versions else meta.weight_version
    return bool(event.output_ids) and first != str(expected)
