"""One process on the cluster, as seen by the controller: process id, log and exit of its seat.

Communicates with one seat, copies its log, and explains the loss of the seat or its node. Placements are managed in
launcher.py; exits are handled in supervisor.py.

Loop `_follow`, one task per process: waits until Ray has placed the seat, and for its order (limited by the supervisor,
which reads `awaited` and gives up after launch.ray.node_wait_s), then polls for news, each at most NEWS_S later. Ends
with the process, its seat or its node.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, first_line
from controller.launch.cluster.connection import Cluster, import_ray
from controller.launch.cluster.seat import News, Order, Place, Seated

log = logging.getLogger(__name__)

NEWS_S = 1.0
"""Time after which a seat without news answers."""
ANSWER_S = 30.0
"""Additional time after which an unanswered poll is repeated."""
RETRY_S = 0.5
"""Interval of polls of a seat that Ray cannot reach at the moment."""
FORCE_S = 2.0
"""After a kill the seat must report the exit within this time, or it is killed with its process."""
CLOSE_S = 3.0
"""Time limit for a seat to clean up after its process."""
LOST = -int(signal.SIGKILL)
"""Return code of a process that was lost with its seat."""

OnSeated = Callable[[Seated], None]
MakeOrder = Callable[[Place], Awaitable[Order]]


class SeatProcess:
    """A process that waits for its placement, runs, or has exited."""

    def __init__(
        self,
        actor: Any,
        order: MakeOrder,
        log_path: Path,
        cluster: Cluster,
        on_seated: OnSeated,
        *,
        needs: str,
    ) -> None:
        """`order(place)`: returns what the seat starts; `on_seated`: called once when it has started; `needs`:
        resources of its placement, as text.
        """
        self._actor, self._order, self._log_path, self._cluster = actor, order, log_path, cluster
        self._on_seated = on_seated
        self._awaited = f"free resources on a node ({needs})"
        self._place: Place | None = None
        self._seated: Seated | None = None
        self._returncode: int | None = None
        self._cpu_s: float | None = None
        self._rss_mb: float | None = None
        self._over = asyncio.Event()
        self._log_path.touch()
        self._task = asyncio.create_task(self._follow(), name=f"seat of {log_path.stem}")

    @property
    def pid(self) -> int:
        """Process id on its node; 0 before it is started."""
        return self._seated.pid if self._seated else 0

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs or waits for its placement."""
        return self._returncode

    @property
    def cpu_s(self) -> float | None:
        """Processor time of it and its descendants at its last news."""
        return self._cpu_s

    @property
    def rss_mb(self) -> float | None:
        """Resident memory at its last news."""
        return self._rss_mb

    @property
    def awaited(self) -> str:
        """Its placement, or those of the ranks that start together with it; empty once it is being started."""
        return self._awaited

    def terminate(self) -> None:
        """Send SIGTERM; if it is not started yet, cancel it immediately."""
        self._signal(signal.SIGTERM, whole_session=False)

    def kill(self) -> None:
        """Send SIGKILL to it and its descendants; its seat is killed too if it does not answer."""
        if self._returncode is None:
            self._signal(signal.SIGKILL, whole_session=True)
            asyncio.get_running_loop().call_later(FORCE_S, self._force)

    async def wait(self) -> None:
        """Wait until it has exited."""
        await self._over.wait()

    def end_with(self, words: str) -> None:
        """End it as lost, with this message as the last line of its log."""
        self._say(f"error: {words}")
        self.kill()

    # ------------------------------------------------------------ inside

    def _signal(self, number: signal.Signals, *, whole_session: bool) -> None:
        if self._returncode is not None:
            return
        if self._seated is None:
            self._force()
        else:
            self._actor.signal.remote(int(number), whole_session=whole_session)

    def _force(self) -> None:
        """Kill it with its seat, immediately."""
        if self._returncode is None:
            self._task.cancel()
            self._leave_seat()
            self._end(LOST)

    async def _follow(self) -> None:
        ray = import_ray()
        try:
            self._place = await self._actor.place.remote()
            assert self._place is not None
            self._awaited = "the placements of the trainer's other ranks"
            order = await self._order(self._place)
            self._awaited = ""
            self._seated = await self._actor.start.remote(order)
            assert self._seated is not None
            self._on_seated(self._seated)
            returncode = await self._relay()
            await self._tidy()
            self._end(returncode)
        except ray.exceptions.RayError as error:
            await self._lost(error)
        except (OSError, OperationError) as error:  # no space for its log, or no address to meet
            self._leave_seat()
            log.warning("%s: %s", self._log_path.stem, error)
            self._end(LOST)

    async def _relay(self) -> int:
        """Copy its output to its log until it has exited; return its exit code."""
        ray, offset = import_ray(), 0
        while True:
            try:
                news: News = await asyncio.wait_for(self._actor.news.remote(offset, NEWS_S), NEWS_S + ANSWER_S)
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(RETRY_S)
                continue
            except TimeoutError:
                continue
            self._cpu_s = news.cpu_s if news.cpu_s is not None else self._cpu_s
            self._rss_mb = news.rss_mb if news.rss_mb is not None else self._rss_mb
            if news.log:
                await asyncio.to_thread(self._append, news.log)
                offset += len(news.log)
            if news.returncode is not None:
                return news.returncode

    async def _tidy(self) -> None:
        """Let the seat clean up, then release its placement."""
        ray = import_ray()
        try:
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.info("the Ray actor of %s did not clean up: %s", self._log_path.stem, first_line(error))
        self._leave_seat()

    async def _lost(self, error: Exception) -> None:
        """Handle the loss of its seat: write the reason to its log, where the supervisor reads it."""
        where = f"on node {self._place.address}" if self._place else "before it was placed"
        cause = getattr(error, "cause", None)  # an exception of a method of the seat
        words = f"SeatLost: Ray ended the actor of this process {where} ({first_line(cause or error)})"
        if self._place is not None and not await asyncio.to_thread(self._cluster.is_alive, self._place.node_id):
            words = f"NodeLost: node {self._place.address} is no longer in the Ray cluster"
        self._say(f"error: {words}")
        self._leave_seat()
        self._end(LOST)

    def _leave_seat(self) -> None:
        import_ray().kill(self._actor, no_restart=True)

    def _end(self, returncode: int) -> None:
        if self._returncode is None:
            self._returncode = returncode
        self._over.set()

    def _say(self, line: str) -> None:
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            log.warning("%s: %s (%s)", self._log_path.stem, line, error)

    def _append(self, data: bytes) -> None:
        with self._log_path.open("ab") as file:
            file.write(data)
