"""A feed computes the content of one page once for all its viewers, and only while there are viewers.

Manages viewers and limits the processor time of the shared computation. The content is made in run_list.py and
run_view.py, HTTP is in server.py.

Map. The first viewer starts the task. The task refreshes the view in a thread, sends the same bytes to every viewer,
and pauses until the refresh has used no more than BUDGET of one core. When the last viewer disconnects, the task ends.
A viewer that reads slower than messages arrive is disconnected: its browser reconnects and starts with a whole
snapshot.
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
"""Share of one core that a feed may use: half of what viewers may cost a run that has a single core."""
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
MAX_WAITING = 16
"""Maximum queued messages of one viewer."""
KEEP_S = 60.0
"""Time that a view is kept after its last viewer, so that reloading the page reads no file again."""


class View(Protocol):
    """Content of a page. Called by one thread at a time."""

    def refresh(self) -> Mapping[str, Any]:
        """Read the files and return the changes; empty if there are none. Raises UserError, OSError."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """Return the complete content as of the last refresh."""
        ...


@dataclass(eq=False)
class Viewer:
    """One connected page. None in the queue ends its stream."""

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
        """Add a viewer, with the whole view as its first message. Raises UserError or OSError if it cannot be read."""
        viewer = Viewer()
        if self._forgetting is not None:
            self._forgetting.cancel()
        while (whole := self._whole) is None:
            # Shielded: if the browser disconnects meanwhile, the thread must keep its lock.
            await asyncio.shield(self._prepare())
        # A refresh in progress sends its change to this viewer too, so that no change is missed.
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
                self._whole = await asyncio.to_thread(self._encoded, self._view, self._problem)

    def _begin(self) -> View:
        view = self.make()
        view.refresh()
        return view

    @staticmethod
    def _encoded(view: View, problem: str) -> bytes:
        return message("snapshot", {**view.snapshot(), "problem": problem})

    def _rest(self) -> None:
        if self._task is not None and not self._lock.locked():
            # only cancelled while it sleeps; a refresh is not interrupted, and the task ends after it
            self._task.cancel()
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
        """The message for all viewers; None if nothing has changed."""
        assert self._view is not None
        began_s = self.cpu_clock()
        self.num_refreshes += 1
        sent = None
        try:
            change, problem = self._view.refresh(), ""
            if problem != self._problem:
                change = {**change, "problem": problem}
            sent = message("change", change) if change else None
        except (UserError, OSError) as error:
            problem = str(error)
        except Exception as error:  # fault boundary: a failure on the page of one run must not end the others
            log.exception("updating a page of the dashboard failed")
            problem = f"this page cannot be updated ({first_line(error)})"
        if problem and problem != self._problem:
            sent = message("change", {"problem": problem})
        self._problem = problem
        if sent is not None:
            self._whole = None
        self._cost_s = self.cpu_clock() - began_s
        return sent

    def _end(self, viewer: Viewer) -> None:
        while viewer.messages.qsize() > MAX_WAITING:
            viewer.messages.get_nowait()
        viewer.messages.put_nowait(None)
        self.viewers.discard(viewer)


def pause_s(cost_s: float) -> float:
    """Length of the pause after a refresh that used the given processor time."""
    return min(MAX_PAUSE_S, max(MIN_PAUSE_S, cost_s / BUDGET))


def message(event: str, content: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event. JSON has no line break, so one data line is sufficient."""
    return b"event: " + event.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
