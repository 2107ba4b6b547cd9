"""One process on the cluster, seen from the controller: its seat's answers as a process id, a log and an end.

Owns: the conversation with one seat, the relay of its log, what is said when the seat or its node is gone. Refuses:
which place it has (launcher.py), what an end means (supervisor.py).

Loop `_follow`, one task per process: waits for Ray to give the seat its place, and for its order (bounded by
supervision, which asks what is `awaited` and gives up after launch.ray.node_wait_s), then asks for news again and
again, each at most NEWS_S later. Ends with the process, its seat or its node.
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
"""A seat with nothing to tell answers after this long."""
ANSWER_S = 30.0
"""A seat that answers nothing for so much longer is asked again."""
RETRY_S = 0.5
"""Between questions to a seat that Ray cannot reach at the moment."""
FORCE_S = 2.0
"""After a kill the seat tells the end within this long, or goes with its process."""
CLOSE_S = 3.0
"""For a seat to clean up behind its process."""
LOST = -int(signal.SIGKILL)
"""Return code of a process that went with its seat."""

OnSeated = Callable[[Seated], None]
MakeOrder = Callable[[Place], Awaitable[Order]]


class SeatProcess:
    """A process on its way to its seat, in it, or ended."""

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
        """`order(place)`: what the seat starts there, as soon as it is known; `on_seated`: called once when it has
        started; `needs`: what its place takes from a node, in words.
        """
        self._actor, self._order, self._log_path, self._cluster = actor, order, log_path, cluster
        self._on_seated = on_seated
        self._awaited = f"room on a node ({needs})"
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
        """Process id on its node; 0 until it is there."""
        return self._seated.pid if self._seated else 0

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs or is on its way."""
        return self._returncode

    @property
    def cpu_s(self) -> float | None:
        """Processor time it had spent at its last news, and what it started."""
        return self._cpu_s

    @property
    def rss_mb(self) -> float | None:
        """Resident memory at its last news."""
        return self._rss_mb

    @property
    def awaited(self) -> str:
        """Its place, or those of the ranks that start together with it; empty once it is being started."""
        return self._awaited

    def terminate(self) -> None:
        """SIGTERM; on its way it goes at once."""
        self._signal(signal.SIGTERM, whole_session=False)

    def kill(self) -> None:
        """SIGKILL to it and all it started; its seat goes with it when it does not answer."""
        if self._returncode is None:
            self._signal(signal.SIGKILL, whole_session=True)
            asyncio.get_running_loop().call_later(FORCE_S, self._force)

    async def wait(self) -> None:
        """Until it has ended."""
        await self._over.wait()

    def end_with(self, words: str) -> None:
        """End it as an accident with these last words."""
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
        """It ends with its seat, now."""
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
        except (OSError, OperationError) as error:  # no room for its log, nowhere to meet
            self._leave_seat()
            log.warning("%s: %s", self._log_path.stem, error)
            self._end(LOST)

    async def _relay(self) -> int:
        """Write what it says into its log until it has ended; its return code."""
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
        """Let the seat clean up, then give its place back."""
        ray = import_ray()
        try:
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.info("the seat of %s did not clean up: %s", self._log_path.stem, first_line(error))
        self._leave_seat()

    async def _lost(self, error: Exception) -> None:
        """Its seat is gone: say why in its log, where supervision looks for last words."""
        where = f"on node {self._place.address}" if self._place else "before it was placed"
        cause = getattr(error, "cause", None)  # what a method of the seat raised
        words = f"SeatLost: Ray ended its seat {where} ({first_line(cause or error)})"
        if self._place is not None and not await asyncio.to_thread(self._cluster.is_alive, self._place.node_id):
            words = f"NodeLost: node {self._place.address} of the Ray cluster is gone"
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
