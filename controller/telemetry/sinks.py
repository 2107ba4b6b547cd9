"""Metrics sinks alongside metrics.jsonl: each in a thread of its own behind a bounded queue, none able to hold up the
run.

Owns: the threads, the queues, counting what is lost, saying so once. Refuses: what a sink does with a row (*_sink.py),
which rows there are (journal.py).

Map. The event loop calls `offer`, which never waits: a full queue loses the row, and that is counted. Each thread takes
rows in order and calls `Sink.write`, which may wait, raise or hang: a row it raises over is lost and counted. `news`
hands over what changed (a sink went down, came back) for the journal; `close` gives all threads one common grace, then
leaves them behind (they are daemons) and counts what they had not written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areal_like.errors import UserError, first_line
from controller.telemetry.callbacks import CallbackSink

log = logging.getLogger(__name__)

QUEUE_ROWS = 256
"""Rows that wait for a slow sink: minutes of a run, and some 10 MB at the very most."""
RECOVERED_S = 10.0
"""A sink that lost nothing for so long is up again; bounds how often its ups and downs are reported."""


class Sink(Protocol):
    """Takes rows of some kinds; `write` and `close` are called by one thread only."""

    name: str
    kinds: frozenset[str]

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row; raising, or never coming back, loses it."""
        ...

    def close(self) -> None:
        """Finish what was written."""
        ...


@dataclass(frozen=True)
class SinkNews:
    """Something changed at a sink."""

    sink: str
    event: Literal["down", "up", "closed"]
    error: str
    written: int
    lost: int

    def facts(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl."""
        return {
            "sink": self.sink, "event": self.event, "error": self.error, "written": self.written, "lost": self.lost,
        }  # fmt: skip


class SinkThread:
    """One sink, its queue and its thread."""

    def __init__(self, sink: Sink, refusal: Callable[[], str] = lambda: "") -> None:
        """refusal: why it takes no row now; empty: it does."""
        self._sink, self._refusal = sink, refusal
        self._rows: deque[Mapping[str, Any]] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._is_busy = False
        self._error = ""
        self._failed_s: float | None = None
        """When it last lost a row, while it counts as down."""
        self._is_down_reported = False
        self.written = self.lost = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Of the sink."""
        return self._sink.name

    def offer(self, record: Mapping[str, Any]) -> None:
        """A row for this sink, if it wants rows of that kind. Never waits."""
        if record["kind"] not in self._sink.kinds:
            return
        with self._changed:
            if self._is_closing:
                return
            if reason := self._refusal():
                self._lose(1, f"disabled: {reason}")
                return
            if len(self._rows) >= QUEUE_ROWS:
                self._lose(1, f"it is too slow: {QUEUE_ROWS} rows wait for it")
                return
            self._rows.append(record)
            self._changed.notify()

    def news(self) -> SinkNews | None:
        """That it went down or came back since the last call."""
        with self._changed:
            if self._failed_s is None:
                return None
            if not self._is_down_reported:
                self._is_down_reported = True
                return self._news("down", self._error)
            if time.monotonic() - self._failed_s >= RECOVERED_S and not self._rows and not self._is_busy:
                self._failed_s, self._is_down_reported = None, False
                return self._news("up", "")
        return None

    def ask_to_close(self) -> None:
        """No more rows: write what waits, then end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def closed(self, timeout_s: float) -> SinkNews:
        """Its last news, once it has ended or the time is over; what it did not write is lost."""
        self._thread.join(timeout_s)
        with self._changed:
            if self._thread.is_alive():
                unwritten = len(self._rows) + self._is_busy
                self._rows.clear()
                self._lose(unwritten, f"it did not finish in time: {unwritten} rows were not written")
            return self._news("closed", self._error if self._failed_s is not None else "")

    # ------------------------------------------------------------ inside

    def _run(self) -> None:
        while (record := self._next()) is not None:
            try:
                self._sink.write(record)
            except Exception as error:  # somebody else's library: whatever it raises costs one row
                self._done(error)
            else:
                self._done(None)
        try:
            self._sink.close()
        except Exception as error:  # as above; nothing is counted, the rows were written
            log.warning("closing the sink %s: %s", self.name, first_line(error))
            with self._changed:
                self._lose(0, first_line(error))

    def _next(self) -> Mapping[str, Any] | None:
        with self._changed:
            while not self._rows and not self._is_closing:
                self._changed.wait()  # owed by the run: it offers rows or closes
            if not self._rows:
                return None
            self._is_busy = True
            return self._rows.popleft()

    def _done(self, error: Exception | None) -> None:
        with self._changed:
            self._is_busy = False
            if error is None:
                self.written += 1
            else:
                self._lose(1, f"{type(error).__name__}: {first_line(error)}")

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self._failed_s, self._error = time.monotonic(), why

    def _news(self, event: Literal["down", "up", "closed"], error: str) -> SinkNews:
        return SinkNews(self.name, event, error, self.written, self.lost)


class Sinks:
    """All sinks of a run."""

    def __init__(self, sinks: Sequence[Sink], callbacks: Sequence[CallbackSink] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self._threads = [SinkThread(sink) for sink in sinks]
        self._threads += [SinkThread(one, one.refusal) for one in callbacks]

    def offer(self, record: Mapping[str, Any]) -> None:
        """A row for all sinks."""
        for thread in self._threads:
            thread.offer(record)

    def news(self) -> list[SinkNews]:
        """What changed since the last call."""
        return [news for thread in self._threads if (news := thread.news()) is not None]

    def take_rows(self) -> list[dict[str, Any]]:
        """Rows with the numbers of callbacks since the last call."""
        return [row for callback in self._callbacks for row in callback.take_rows()]

    def end(self, summary: Mapping[str, Any]) -> list[str]:
        """Show the callbacks the summary, when their threads have ended; what went wrong."""
        return [problem for callback in self._callbacks if (problem := callback.end(summary))]

    def close(self, grace_s: float) -> list[SinkNews]:
        """End all threads within `grace_s` together; the last news of each."""
        for thread in self._threads:
            thread.ask_to_close()
        deadline_s = time.monotonic() + grace_s
        return [thread.closed(max(0.0, deadline_s - time.monotonic())) for thread in self._threads]

    def counts(self) -> dict[str, dict[str, int]]:
        """Rows written and lost, by sink."""
        return {thread.name: {"written": thread.written, "lost": thread.lost} for thread in self._threads}


def absent(name: str, remedy: str) -> UserError:
    """The error for a sink whose package is not installed."""
    return UserError(f"{name} is not installed", where=f"metrics.{name}", remedy=remedy)
