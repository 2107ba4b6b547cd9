"""The reward service: connects its clients and the controller with the scheduler, the pool and the environments.

Scoring is in pool.py, retries and duplicates are in request_scheduler.py, and episodes in
services/environment/episode_scheduler.py.

Loops.  `_intake`      waits for a client's message, woken by the socket; replies at once, if only with a refusal.
        `_controller`  waits for the controller's Shutdown, woken by the socket.
        `scheduler.work` one per scoring process of `num_workers`; waits for a request, then for its verdict.
        `pool.run`     keeps the processes running.
Shutdown: `stop` is set by SIGTERM or by a Shutdown of the controller. Clients receive a Goodbye and new requests are
refused, so that they use other services; accepted requests are scored and answered within the drain's deadline, and the
remaining ones are refused then.
Start-up: the scorers are loaded in a child first, so that a user's mistake ends the process before it binds a socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from areal_like.config import ProcessSpec, TraceSettings
from areal_like.errors import UserError
from areal_like.state_lane import StateLane
from areal_like.trace import Tracer
from areal_like.transport.channel import Hub, Peer
from areal_like.transport.sockets import RateLimitedLog
from areal_like.verdict import Verdict
from areal_like.wire.encoding import WireLimits
from areal_like.wire.messages import (
    EnvironmentClosed,
    EnvironmentReply,
    EnvironmentRequest,
    Goodbye,
    Heartbeat,
    Hello,
    ScoreReply,
    ScoreRequest,
    Shutdown,
    StatsReply,
    StatsRequest,
)
from services.environment.episode_scheduler import EpisodeScheduler
from services.processes import process_tree
from services.reward.cache import ScoreCache
from services.reward.config import RewardSettings, contradictions, scorer_names
from services.reward.pool import Pool
from services.reward.record_files import with_record_files
from services.reward.request_scheduler import Entry, RequestScheduler

log = logging.getLogger(__name__)

LISTEN_S = 1.0
CONNECT_TIMEOUT_S = 60.0
LIMITS = WireLimits(max_frames=64, max_header_bytes=128 << 20, max_message_bytes=256 << 20)
"""Largest message; a larger one than any row and answer is refused unread."""
DRAIN_POLL_S = 0.02
CLOSING_S = 0.5
"""Part of a Shutdown's deadline that is reserved for closing."""


@dataclass(frozen=True)
class ServiceSpec:
    """The context of one service process. run_dir: None outside of a run; hub_address: empty without a controller."""

    name: str
    run_id: str
    bind_address: str
    curve_dir: Path
    run_dir: Path | None = None
    hub_address: str = ""
    heartbeat_s: float = 0.5
    silence_s: float = 15.0
    trace: TraceSettings = field(default_factory=TraceSettings)

    @staticmethod
    def of(spec: ProcessSpec) -> ServiceSpec:
        """The context of a process of a run. Raises UserError."""
        if spec.bind_address is None:
            raise UserError("the settings of the reward service contain no bind_address", where=spec.name)
        return ServiceSpec(
            name=spec.name,
            run_id=spec.run_id,
            bind_address=spec.bind_address,
            curve_dir=Path(spec.curve_dir),
            run_dir=Path(spec.run_dir),
            hub_address=spec.hub_address,
            heartbeat_s=spec.heartbeat_s,
            silence_s=spec.silence_s,
            trace=spec.trace,
        )


class RewardServer:
    """One service process. Call `run` once."""

    def __init__(
        self, spec: ServiceSpec, settings: RewardSettings, on_address: Callable[[str], None] = lambda address: None
    ) -> None:
        """`on_address` is called with the address (with the real port) once it listens."""
        settings = with_record_files(settings, spec.run_dir)
        self._spec, self._settings, self._on_address = spec, settings, on_address
        self._state, self._drain_s, self._began_s = "start", settings.drain_s, time.monotonic()
        self._environments = (
            EpisodeScheduler(settings.environment, lambda peer, reply: self._hub.send(peer, reply), self._scoring_pids)
            if settings.environment is not None
            else None
        )
        self._pool = Pool(settings, self._environment_pids, is_shared=spec.run_dir is None)
        self._hub: Hub = Hub(
            run_id=spec.run_id,
            role="reward",
            bind=spec.bind_address,
            curve_dir=spec.curve_dir,
            accept=frozenset({ScoreRequest, StatsRequest, EnvironmentRequest, EnvironmentClosed}),
            limits=LIMITS,
        )
        self._scheduler = RequestScheduler(self._pool, settings, self._hub.send, self._on_busy)
        self._peer = self._make_peer(spec.curve_dir) if spec.hub_address else None
        self._tracer: Tracer | None = None
        self._doing: StateLane | None = None
        self._stop = asyncio.Event()
        self._warnings = RateLimitedLog(log)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain. Raises UserError for scorers that cannot be used and ports in use."""
        self._stop = stop
        process_tree.become_subreaper()
        try:
            if not await self._before_stop(self._load()):
                return
            if self._settings.scorers:
                self._scheduler.cache = self._make_cache()
            self._announce(await self._hub.start())
            self._tracer = Tracer.of(self._spec.run_dir or Path(), self._spec.name, self._spec.trace)
            self._doing = StateLane(self._tracer, "wait:requests")
            await self._serve()
        finally:
            await self._pool.close()
            if self._environments is not None:
                await self._environments.close()
            if self._peer is not None:
                await self._peer.close("service ends")
            await self._hub.close()
            if self._doing is not None:
                self._doing.close()
            if self._tracer is not None:
                self._tracer.close()
        log.info("ended: %s", self.counters())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            intake = tasks.create_task(self._intake(), name="intake")
            others = []
            if self._environments is not None:
                others.append(tasks.create_task(self._environments.run(), name="environments"))
            if self._settings.scorers:
                others.append(tasks.create_task(self._pool.run(), name="pool"))
            for lane in range(self._settings.num_workers if self._settings.scorers else 0):
                others.append(tasks.create_task(self._work(lane), name=f"lane {lane}"))
            if self._peer is not None:
                others.append(tasks.create_task(self._controller(self._peer), name="controller"))
            self._state = "serve"
            await self._stop.wait()  # the owner is the signal handler, or _controller
            await self._drain()
            for task in [intake, *others]:
                task.cancel()

    async def _load(self) -> None:
        """Load scorers and environment. Raises UserError."""
        if self._settings.scorers:
            await self._pool.start()
        if self._environments is not None:
            await self._environments.start()

    def _scoring_pids(self) -> frozenset[int]:
        return self._pool.pids

    def _environment_pids(self) -> frozenset[int]:
        return self._environments.pool.pids if self._environments is not None else frozenset()

    async def _before_stop(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` to its end; False if `stop` was set first and it was cancelled."""
        task, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)  # `work` has its own deadline
            if task.done():
                await task
                return True
            return False
        finally:
            stopped.cancel()
            task.cancel()
            await asyncio.wait({task, stopped}, timeout=LISTEN_S)

    def _make_cache(self) -> ScoreCache:
        named = zip(scorer_names(self._settings.scorers), self._settings.scorers, strict=True)
        uncached = [name for name, scorer in named if not scorer.cache]
        max_bytes = int(self._settings.cache_mb * 2**20)
        return ScoreCache(max_bytes, self._pool.label, {*self._pool.volatile, *uncached})

    def _announce(self, address: str) -> None:
        """Publish the address: in the log, and in a file for a service bound to port 0."""
        log.info("listening at %s; scoring %s in %d processes", address, self._pool.label, self._settings.num_workers)
        if self._spec.run_dir is not None:
            path = self._spec.run_dir / "processes" / f"{self._spec.name}.address"
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_suffix(".half")
            half.write_text(address)
            half.replace(path)
        self._on_address(address)

    # ------------------------------------------------------------ loops

    async def _intake(self) -> None:
        checked_s = time.monotonic()
        while True:
            taken = await self._hub.receive(LISTEN_S)
            if taken is not None:
                name, message = taken
                if isinstance(message, ScoreRequest):
                    self._on_score(name, message)
                elif isinstance(message, StatsRequest):
                    self._hub.send(name, self._stats(message.request_id))
                elif isinstance(message, EnvironmentRequest | EnvironmentClosed):
                    self._on_environment(name, message)
                elif isinstance(message, Hello):
                    self._scheduler.welcome(name, message.incarnation)
                    if self._environments is not None:
                        self._environments.welcome(name, message.incarnation)
                elif isinstance(message, Goodbye):
                    self._dismiss(name)
            if time.monotonic() - checked_s > LISTEN_S:
                checked_s = time.monotonic()
                for name in self._hub.silent(self._spec.silence_s):
                    log.warning(
                        "%s has sent nothing for %g s, so it must register and send its requests again",
                        name,
                        self._spec.silence_s,
                    )
                    self._hub.forget(name)
                    self._dismiss(name)  # a dead run must not occupy the pool

    def _dismiss(self, name: str) -> None:
        self._scheduler.dismiss(name)
        if self._environments is not None:
            self._environments.dismiss(name)

    def _on_score(self, name: str, message: ScoreRequest) -> None:
        if self._settings.scorers:
            self._scheduler.offer(name, message)
        else:
            verdict = Verdict(kind="invalid", reason="the answer was not scored, because reward.scorers is empty")
            self._hub.send(name, ScoreReply(request_id=message.request_id, verdict=verdict))

    def _on_environment(self, name: str, message: EnvironmentRequest | EnvironmentClosed) -> None:
        if isinstance(message, EnvironmentClosed):
            if self._environments is not None:
                self._environments.close_episodes(name, message.episode_ids)
        elif self._environments is not None:
            self._environments.offer(name, message)
        else:
            reason = "this reward service runs no environment (reward.environment)"
            self._hub.send(name, EnvironmentReply(episode_id=message.episode_id, turn=message.turn, status="invalid",
                                                  reason=reason))  # fmt: skip

    async def _controller(self, peer: Peer) -> None:
        await peer.connect(CONNECT_TIMEOUT_S)
        while True:
            message = await peer.receive(LISTEN_S)
            if isinstance(message, Shutdown):
                log.info("the controller requested a shutdown: %s", message.reason)
                self._drain_s = min(self._drain_s, max(message.deadline_s - CLOSING_S, 0.0))
                self._stop.set()

    async def _work(self, lane: int) -> None:
        def on_scored(entry: Entry, verdict: Verdict, began_s: float) -> None:
            if self._tracer is not None and entry.request.arrow:
                _draw(self._tracer, entry.request.arrow, verdict, began_s, f"lane {lane}")
            if not verdict.is_scored:
                text = f"{verdict.reason} ({entry.peer} {entry.request.request_id})"
                self._warnings.log(f"verdict {verdict.kind}", text)

        await self._scheduler.work(on_scored)

    def _on_busy(self, is_busy: bool) -> None:
        if self._doing is not None:
            self._doing.enter("score" if is_busy else "wait:requests")

    async def _drain(self) -> None:
        """Finish open requests until the deadline, and refuse the remaining ones."""
        self._state, self._scheduler.is_draining = "drain", True
        if self._environments is not None:
            self._environments.is_draining = True
        for name in list(self._hub.peers):
            self._hub.send(name, Goodbye(reason="draining"))
        give_up_s = time.monotonic() + self._drain_s
        while self._num_open() and time.monotonic() < give_up_s:  # noqa: ASYNC110  (a deadline is what matters)
            await asyncio.sleep(DRAIN_POLL_S)
        num_refused = self._scheduler.refuse_open()
        if self._environments is not None:
            num_refused += self._environments.refuse_open()
        if num_refused:
            log.warning("exiting with %d unanswered requests; their clients have been notified", num_refused)

    def _num_open(self) -> int:
        return self._scheduler.num_open + (self._environments.num_open if self._environments is not None else 0)

    # ------------------------------------------------------------ towards the controller

    def counters(self) -> dict[str, float]:
        """Current queue and pool, and all counters so far."""
        flat: dict[str, float] = {
            "queue": self._scheduler.num_waiting,
            "busy_workers": self._pool.num_busy,
            "processes": self._pool.num_ready,
            **self._scheduler.cache.counters(),
            **self._scheduler.tally.counters(),
        }
        flat |= {f"pool.{name}": value for name, value in self._pool.counters.items()}
        flat |= self._environments.counters() if self._environments is not None else {}
        flat |= {f"hub.{name}": value for name, value in self._hub.counters.items()}
        return flat

    @property
    def _now(self) -> str:
        if self._state != "serve":
            return self._state
        return "full" if self._scheduler.is_full else "score" if not self._scheduler.is_idle else "wait:request"

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(state=self._now, counters=self.counters())

    def _stats(self, request_id: str) -> StatsReply:
        return StatsReply(
            request_id=request_id,
            name=self._spec.name,
            pid=os.getpid(),
            state=self._now,
            uptime_s=time.monotonic() - self._began_s,
            label=self._pool.label,
            scorers=tuple(self._pool.names),
            num_workers=self._settings.num_workers,
            counters=self.counters(),
        )

    def _make_peer(self, curve_dir: Path) -> Peer:
        hello = Hello(
            role="reward",
            name=self._spec.name,
            pid=os.getpid(),
            run_id=self._spec.run_id,
            incarnation=secrets.token_hex(8),
            capacity=self._settings.num_workers,
        )
        return Peer(
            address=self._spec.hub_address,
            hello=hello,
            curve_dir=curve_dir,
            audience="controller",
            accept=frozenset({Shutdown}),
            heartbeat_s=self._spec.heartbeat_s,
            silence_s=self._spec.silence_s,
            status=self._heartbeat,
        )


def _draw(tracer: Tracer, arrow: str, verdict: Verdict, began_s: float, lane: str) -> None:
    """Record the scoring of one answer as a slice, through which the sample's arrow passes."""
    start_s = tracer.wall_s(began_s)
    end_s = max(tracer.now_s(), start_s + 2e-6)
    tracer.complete("score", start_s, end_s, lane, sample=arrow, kind=verdict.kind)
    tracer.arrow_step(arrow, (start_s + end_s) / 2, lane)


async def serve(spec: ProcessSpec, stop: asyncio.Event) -> None:
    """The main of the service process. Raises UserError and OperationError."""
    try:
        settings = RewardSettings.model_validate(spec.settings)
    except pydantic.ValidationError as error:
        raise UserError(str(error), where="reward settings") from error
    check(settings)
    await RewardServer(ServiceSpec.of(spec), settings).run(stop)


def check(settings: RewardSettings) -> None:
    """Raise UserError for contradicting settings."""
    for key, what, remedy in contradictions(settings):
        raise UserError(what, where=f"reward.{key}", remedy=remedy)
