"""Keeps one engine's server running: starts it, detects when it is dead or hangs, and restarts it with the current
version. If that happens too often, it gives up with a reason.

Requests and versions are in engine.py, processes in process.py.

Each of these signs ends the server's whole process tree:

    sign                                                 detected by
    one of its processes exited                          a check every WATCH_S, and when a stream breaks
    no answer to probes for `control_timeout_s`, two     /model_info every PROBE_S
    at least: a pause of this machine may miss one
    work, no pause, and no token for `stall_timeout_s`   the engine, checked every WATCH_S
    a swap not done within `load_timeout_s`              the engine, which has it replaced: the front process
                                                         responds to probes while the scheduler hangs

The watch is a task. Waits for a server always end: `ready` and `settle` return, or raise its last error. A server that
was attached to is only probed and never ended; when it is reachable again, the current version is loaded into it.

If a server shares its device, others use its memory at times. After `rest` a server that exits is not restarted, which
would take that memory; `resume_server` starts one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from areal_like.errors import EngineError, UserError
from areal_like.transport.ports import can_listen, unused_port
from rollout.engine.server.http import ServerGone, ServerRefused
from rollout.engine.server.kind import ClientT, ModelFolder, ServerKind, ServerLimits
from rollout.engine.server.process import ServerProcess, make_scratch

log = logging.getLogger(__name__)

WATCH_S = 0.25
PROBE_S = 5.0
"""Interval between probes, or a quarter of `control_timeout_s` if that is less."""
READY_POLL_S = 0.1
BACKOFF_S = (0.0, 1.0, 5.0, 15.0)
"""Delays before the first, second, ... restart within the window; the last value repeats."""


@dataclass(frozen=True)
class RunningServer(Generic[ClientT]):
    """A server that is ready. `epoch` counts servers; `is_incremental`: its events contain new tokens only."""

    client: ClientT
    epoch: int
    process: ServerProcess | None
    is_incremental: bool = True


class ServerKeeper(Generic[ClientT]):
    """One server, and the servers that replace it."""

    def __init__(
        self,
        kind: ServerKind[ClientT],
        settings: ServerLimits,
        home: ModelFolder,
        *,
        url: str | None,
        key: str | None = None,
        seed: int,
        log_path: Path,
        stalled_s: Callable[[], float],
        port: int | None = None,
        start_timeout_s: float = 1800.0,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        """`url`: of a running server, with the `key` that it requires; None: servers are launched. `stalled_s()`: for
        how long work has made no progress.

        `port`: of every server launched; None: any free one. `start_timeout_s`: of each start. `report`: receives why a
        server was replaced.
        """
        self._kind, self._settings, self._url, self._key = kind, settings, url, key
        self._seed, self._log_path, self._stalled_s = seed, log_path, stalled_s
        self._port, self._start_timeout_s, self._report = port, start_timeout_s, report
        self.home = home
        self._live: RunningServer[ClientT] | None = None
        self._epoch = 0
        self._changed = asyncio.Condition()
        self._num_checks = 0
        self._probed_s = self._answered_s = 0.0
        self._num_unanswered = 0
        self._wake = asyncio.Event()
        self._doubt = ""
        self._restarts_s: deque[float] = deque()
        self._scratch: Path | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: EngineError | None = None
        self._kill_reason = ""
        self._is_forgiven = True
        """Replacing the current server does not count against the budget."""
        self._rests = False
        self._exit_reason = ""
        """Why the resting server has exited, once it has."""
        self.num_restarts = 0
        self.last_reason = ""

    # ------------------------------------------------------------ life

    async def start(self) -> RunningServer[ClientT]:
        """Start the first server, and the watch. Raises UserError for an error that a restart would not fix."""
        if self._url is None:
            self._scratch = make_scratch(self._kind.scratch_prefix)
        try:
            live = await self._bring_up()
        except BaseException:
            self._remove_scratch()
            raise
        self._task = asyncio.create_task(self._watch(), name="server-watch")
        return live

    async def close(self) -> None:
        """End the watch and the server (an attached server keeps running). Safe to call twice."""
        self._error = self._error or EngineError("the engine was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._take_down()
        self._remove_scratch()
        await self._tell()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------ for the engine

    @property
    def scratch(self) -> Path:
        """A folder for its servers, removed with them."""
        assert self._scratch is not None, "an attached server has none"
        return self._scratch

    @property
    def live(self) -> RunningServer[ClientT] | None:
        """The server if it is ready now."""
        return None if self._kill_reason else self._live

    async def ready(self) -> RunningServer[ClientT]:
        """Wait for a server that is ready. Raises EngineError if there will be none; bounded by the start timeout and
        the budget."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.live is not None or self._error is not None)
        if self._error is not None:
            raise self._error
        assert self._live is not None
        return self._live

    async def settle(self, epoch: int, doubt: str) -> RunningServer[ClientT]:
        """After a failure of the server of `epoch`: return once it was found healthy, or was replaced."""
        if self._live is not None and self._live.epoch == epoch:
            target = self._num_checks + 2  # a running check may have begun before the failure
            self._doubt = doubt
            self._wake.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._error or self._epoch > epoch or self._num_checks >= target)
        return await self.ready()

    async def replace(self, epoch: int, reason: str, *, is_forgiven: bool = True) -> RunningServer[ClientT]:
        """End the server of `epoch` and return a new one: its state is unknown, or it hangs without failing probes.
        `is_forgiven`: the server is not at fault, and the restart does not count against the budget.
        """
        if self._live is not None and self._live.epoch == epoch:
            self._kill_reason, self._is_forgiven = reason, is_forgiven
            self._wake.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._error is not None or self._epoch > epoch)
        return await self.ready()

    def rest(self) -> None:
        """Do not restart a server that exits from now on. Call it while a server is ready; the server must not be
        used.
        """
        self._rests, self._exit_reason = True, ""

    async def terminate(self, epoch: int, reason: str) -> None:
        """End the server of `epoch`, which rests; this frees its memory."""
        assert self._rests, "a server that does not rest would be restarted at once"
        if self._live is not None and self._live.epoch == epoch:
            self._kill_reason, self._is_forgiven = reason, True
            self._wake.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or bool(self._exit_reason))

    async def resume_server(self) -> RunningServer[ClientT]:
        """The server that rested, or a new one if it has exited. Raises EngineError if there will be none."""
        self._rests = False
        self._wake.set()
        return await self.ready()

    # ------------------------------------------------------------ the watch

    async def _watch(self) -> None:
        """Run until cancelled by `close`. Woken every WATCH_S, and after a failure."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        await self._wake.wait()
                self._wake.clear()
                await self._look()
        except EngineError as error:
            self._error = error
        except Exception as error:
            log.exception("monitoring of the %s server failed", self._kind.title)
            self._error = EngineError(
                f"monitoring of the {self._kind.title} server failed: {type(error).__name__}: {error}"
            )
        await self._take_down()
        await self._tell()

    async def _look(self) -> None:
        if self._live is None:  # it exited while resting
            if not self._rests:
                await self._renew(self._exit_reason, is_forgiven=False)
            return
        reason, is_forgiven = (
            self._kill_reason or await self._reason_to_end(),
            bool(self._kill_reason) and self._is_forgiven,
        )
        if reason and self._rests:
            log.warning("%s server: %s; a new server is started for the next version", self._kind.title, reason)
            await self._take_down()
            self._exit_reason, self._doubt = reason, ""
            await self._tell()
        elif reason:
            await self._renew(reason, is_forgiven=is_forgiven)
        elif not self._doubt:
            self._num_checks += 1
            await self._tell()

    async def _reason_to_end(self) -> str:
        """Why the server must be ended; empty if it is healthy. Probes it when a probe is due, or after a failure."""
        live, settings = self._live, self._settings
        assert live is not None
        if live.process is not None and (ended := live.process.why_ended()) is not None:
            return ended
        if self._doubt or time.monotonic() - self._probed_s >= min(PROBE_S, settings.control_timeout_s / 4):
            self._probed_s = time.monotonic()
            if await self._answers(live):
                self._answered_s, self._num_unanswered, self._doubt = time.monotonic(), 0, ""
            else:
                self._num_unanswered += 1
                silent_s = time.monotonic() - self._answered_s
                if silent_s >= settings.control_timeout_s and self._num_unanswered > 1:
                    return f"the server did not respond for {silent_s:.0f} s"
        if (stalled_s := self._stalled_s()) >= settings.stall_timeout_s:
            return f"the server reported no token for {stalled_s:.0f} s"
        return ""

    async def _answers(self, live: RunningServer[ClientT]) -> bool:
        try:
            await live.client.probe()
        except ServerGone:
            return False
        except ServerRefused as error:
            log.warning("the server replied to a health check with an error: %s", error)
        return True

    async def _renew(self, reason: str, *, is_forgiven: bool) -> None:
        """Replace a dead server, as often as the budget allows. Raises EngineError when the budget is used up."""
        await self._take_down()
        self._doubt = ""
        while True:
            self.last_reason = reason
            wait_s = 0.0 if is_forgiven else self._spend(reason)
            words = f"{self._kind.title} server: {reason}; starting a new server with version {self.home.version}"
            if self.home.version < 0:  # the next one is about to be loaded
                words = f"{self._kind.title} server: {reason}; starting another"
            if not is_forgiven:
                words += f" (restart {len(self._restarts_s)} of {self._settings.max_restarts} allowed)"
            log.warning(words)
            self._report(words)
            await asyncio.sleep(wait_s)
            self.num_restarts += 1
            try:
                await self._bring_up()
            except (EngineError, ValueError) as error:
                reason, is_forgiven = str(error), False
                continue
            return

    def _spend(self, reason: str) -> float:
        """Count one restart, and return the delay before it."""
        now_s = time.monotonic()
        while self._restarts_s and now_s - self._restarts_s[0] > self._settings.restart_window_s:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self._settings.max_restarts:
            raise EngineError(
                f"the {self._kind.title} server died more than {self._settings.max_restarts} times within "
                f"{self._settings.restart_window_s:g} s; the last reason: {reason} (log: {self._log_path})"
            )
        wait_s = BACKOFF_S[min(len(self._restarts_s), len(BACKOFF_S) - 1)]
        self._restarts_s.append(now_s)
        return wait_s

    # ------------------------------------------------------------ up and down

    async def _bring_up(self) -> RunningServer[ClientT]:
        process, key, url = None, self._key, self._url
        if url is None:
            key = secrets.token_hex(32)
            process, url = await self._spawn(key)
        client = self._kind.connect(url, key)
        try:
            await self._wait_ready(client, process)
            is_incremental = await self._kind.prepare(client, self.home, is_launched=process is not None)
            if process is not None:
                process.remember_family()
        except BaseException:
            await client.close()
            if process is not None:
                await process.end()
            raise
        self._epoch += 1
        self._live, self._kill_reason = RunningServer(client, self._epoch, process, is_incremental), ""
        self._probed_s = self._answered_s = time.monotonic()
        self._num_unanswered = 0
        await self._tell()
        return self._live

    async def _spawn(self, key: str) -> tuple[ServerProcess, str]:
        assert self._scratch is not None
        port = self._port or unused_port()
        if not can_listen(port):
            raise UserError(
                f"port {port} is in use by another program",
                where=f"{self._kind.section}.port",
                remedy="stop that program, or set a different port; 0 chooses any free port",
            )
        start = self._kind.plan_start(self.home, self._scratch, key=key, port=port, seed=self._seed + self.num_restarts)
        log.info("starting %s", " ".join(start.command))
        process = await ServerProcess.start(
            start.command, start.variables, self._log_path, self._scratch, self._kind.shared_memory
        )
        return process, f"http://127.0.0.1:{port}"

    async def _wait_ready(self, client: ClientT, process: ServerProcess | None) -> None:
        """Wait until the server responds. Raises UserError or EngineError if it exits first, EngineError at the
        deadline."""
        limit_s = self._start_timeout_s if process else self._settings.control_timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            if process is not None and (ended := process.why_ended()) is not None:
                raise self._kind.explain(process.log_tail(), ended, self._log_path)
            try:
                return await client.probe()
            except ServerGone as error:
                if time.monotonic() > deadline_s:
                    what = f"the {self._kind.title} server was not ready within {limit_s:g} s"
                    if process is None:
                        raise EngineError(f"{what}: {error}; check the server at {client.url}") from error
                    raise EngineError(
                        f"{what}: {error}; see its log {self._log_path}, or raise launch.startup_timeout_s"
                    ) from error
            except ServerRefused:  # it listens before it can respond
                pass
            await asyncio.sleep(READY_POLL_S)

    async def _take_down(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            await live.client.close()
            if live.process is not None:
                await live.process.end()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
