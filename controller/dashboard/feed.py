"""What all viewers of one page see, computed once for all of them and only while there are some.

Owns: viewers, the shared computation, its budget of processor time. Refuses: what is shown (run_list.py, run_view.py),
HTTP (server.py).

Map. The first viewer starts the task; it refreshes the view in a thread, hands every viewer the same bytes, and pauses
until that refresh has taken no more than BUDGET of one core. The last viewer that leaves ends it. A viewer that reads
slower than messages come is cut off: its browser connects again and begins with a whole snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from areal_like.errors import UserError, first_line

log = logging.getLogger(__name__)

BUDGET = 0.005
"""Share of one core that a feed may take: half of what a viewer may cost a run that has a single core."""
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
MAX_WAITING = 16
"""Messages that wait for one viewer."""
KEEP_S = 60.0
"""A view is kept so long after its last viewer: a reload of the page reads nothing again."""


class View(Protocol):
    """What a page shows. One thread at a time calls it."""

    def refresh(self) -> Mapping[str, Any]:
        """Look at the files and return what has changed; empty where nothing has. Raises UserError, OSError."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """All that the last refresh found."""
        ...


@dataclass(eq=False)
class Viewer:
    """One connected page. None in the queue ends it."""

    messages: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING + 1))


@dataclass
class Feed:
    """One view and its viewers."""

    make: Callable[[], View]
    cpu_clock: Callable[[], float] = time.thread_time
    sleep: Callable[[float], Any] = asyncio.sleep
    viewers: set[Viewer] = field(default_factory=set)
    num_refreshes: int = 0
    _view: View | None = None
    _whole: bytes | None = None
    _problem: str = ""
    _cost_s: float = 0.0
    _task: asyncio.Task[None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _forgetting: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Viewer]:
        """A viewer, with the whole view as its first message. Raises UserError, OSError: it cannot be read."""
        viewer = Viewer()
        if self._forgetting is not None:
            self._forgetting.cancel()
        while (whole := self._whole) is None:
            # Shielded: where the browser goes away meanwhile, the thread must not lose the lock it works under.
            await asyncio.shield(self._prepare())
        # A refresh that is under way hands its change to this viewer too, so that nothing is missed in between.
        viewer.messages.put_nowait(whole)
        self.viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="dashboard feed")
        try:
            yield viewer
        finally:
            self.viewers.discard(viewer)
            if not self.viewers:
                self._rest()

    async def close(self) -> None:
        """End every viewer."""
        for viewer in list(self.viewers):
            self._end(viewer)
        self._rest()
        if self._forgetting is not None:
            self._forgetting.cancel()

    async def _prepare(self) -> None:
        async with self._lock:
            if self._view is None:
                self._view = await asyncio.to_thread(self._begin)
            if self._whole is None:
                self._whole = await asyncio.to_thread(self._encoded, self._view)

    def _begin(self) -> View:
        view = self.make()
        view.refresh()
        return view

    @staticmethod
    def _encoded(view: View) -> bytes:
        return message("snapshot", view.snapshot())

    def _rest(self) -> None:
        if self._task is not None and not self._lock.locked():
            self._task.cancel()  # it sleeps; in a refresh it must not be cut, and ends by itself after it
            self._task = None
        self._forgetting = asyncio.get_running_loop().call_later(KEEP_S, self._forget)

    def _forget(self) -> None:
        self._view = self._whole = None

    async def _run(self) -> None:
        while self.viewers:
            await self.sleep(pause_s(self._cost_s))
            async with self._lock:
                sent = await asyncio.to_thread(self._refresh)
                for viewer in list(self.viewers) if sent else ():
                    if viewer.messages.qsize() >= MAX_WAITING:
                        self._end(viewer)
                    else:
                        viewer.messages.put_nowait(sent)
        self._task = None

    def _refresh(self) -> bytes | None:
        """The message for all viewers; None where nothing has changed."""
        assert self._view is not None
        began_s = self.cpu_clock()
        self.num_refreshes += 1
        try:
            change, problem = self._view.refresh(), ""
        except (UserError, OSError) as error:
            change, problem = {}, str(error)
        except Exception as error:  # fault boundary: the page of one run must not end those of the others
            log.exception("a page cannot be updated")
            change, problem = {}, f"this page cannot be updated ({first_line(error)})"
        if problem != self._problem:
            change, self._problem = {**change, "problem": problem}, problem
        sent = None
        if change:
            self._whole, sent = None, message("change", change)
        self._cost_s = self.cpu_clock() - began_s
        return sent

    def _end(self, viewer: Viewer) -> None:
        while viewer.messages.qsize() > MAX_WAITING:
            viewer.messages.get_nowait()
        viewer.messages.put_nowait(None)
        self.viewers.discard(viewer)


def pause_s(cost_s: float) -> float:
    """How long to rest after a refresh that took so much processor time."""
    return min(MAX_PAUSE_S, max(MIN_PAUSE_S, cost_s / BUDGET))


def message(event: str, content: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON has no line break, so one data line holds it."""
    return b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
