"""Metrics sinks in addition to metrics.jsonl: each in its own thread behind a bounded queue, so that none can delay the
run.

Manages threads and queues, counts lost rows, and reports failures once. What a sink does with a row is in *_sink.py,
rows are made in journal.py.

Map. The event loop calls `offer`, which never waits: if the queue is full the row is lost and counted. Each thread
takes rows in order and calls `Sink.write`, which may wait, raise or hang: a row for which it raises is lost and
counted. `news` returns changes (a sink went down, recovered) for the journal. `close` waits for all threads at once,
for each at most its grace period, then abandons them (they are daemons) and counts the rows they had not written.
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
"""Maximum rows queued for a slow sink: minutes of a run, and at most some 10 MB."""
CLOSE_S = 5.0
"""Time for a sink to write its queue when the run ends. A sink that needs more has an attribute `grace_s`."""
SAY_S = 3.0
"""After this time the user is shown what the end of the run waits for."""
LOOK_S = 0.05
RECOVERED_S = 10.0
"""A sink that lost no rows for this long counts as up again; limits how often changes are reported."""


class Sink(Protocol):
    """Receives rows of some kinds; `write` and `close` are called by one thread only."""

    name: str
    kinds: frozenset[str]

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row; if it raises or never returns, the row is lost."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


@dataclass(frozen=True)
class SinkNews:
    """A change of a sink's state."""

    sink: str
    event: Literal["down", "up", "closed"]
    error: str
    written: int
    lost: int

    def facts(self) -> dict[str, Any]:
        """The change as written to metrics.jsonl."""
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
        """Time of its last lost row, while it counts as down."""
        self._is_down_reported = False
        self.written = self.lost = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the sink."""
        return self._sink.name

    @property
    def grace_s(self) -> float:
        """Seconds to wait for it when the run ends; a sink that is down gets no more than the others."""
        with self._changed:
            is_down = self._failed_s is not None
        return CLOSE_S if is_down else max(CLOSE_S, getattr(self._sink, "grace_s", 0.0))

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether it has written all its rows and closed, or does so within that time."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def offer(self, record: Mapping[str, Any]) -> None:
        """Queue a row for this sink, if it uses rows of that kind. Never waits."""
        if record["kind"] not in self._sink.kinds:
            return
        with self._changed:
            if self._is_closing:
                return
            if reason := self._refusal():
                self._lose(1, f"disabled: {reason}")
                return
            if len(self._rows) >= QUEUE_ROWS:
                self._lose(1, f"the sink is too slow: {QUEUE_ROWS} rows are waiting")
                return
            self._rows.append(record)
            self._changed.notify()

    def news(self) -> SinkNews | None:
        """Whether it went down or recovered since the last call."""
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
        """Accept no more rows: write the queue, then end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def closed(self) -> SinkNews:
        """Its last news; unwritten rows are lost."""
        with self._changed:
            if self._thread.is_alive():
                unwritten = len(self._rows) + self._is_busy
                self._rows.clear()
                self._lose(unwritten, f"the sink did not finish in time: {unwritten} rows were not written")
            return self._news("closed", self._error if self._failed_s is not None else "")

    # ------------------------------------------------------------ inside

    def _run(self) -> None:
        while (record := self._next()) is not None:
            try:
                self._sink.write(record)
            except Exception as error:  # third-party library: any exception loses one row
                self._done(error)
            else:
                self._done(None)
        try:
            self._sink.close()
        except Exception as error:  # same as above; nothing is counted, because the rows were written
            log.warning("closing the metrics sink %s failed: %s", self.name, first_line(error))
            with self._changed:
                self._lose(0, first_line(error))

    def _next(self) -> Mapping[str, Any] | None:
        with self._changed:
            while not self._rows and not self._is_closing:
                self._changed.wait()  # woken by the run, which offers rows or closes
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
        """Queue a row for all sinks."""
        for thread in self._threads:
            thread.offer(record)

    def news(self) -> list[SinkNews]:
        """Changes since the last call."""
        return [news for thread in self._threads if (news := thread.news()) is not None]

    def take_rows(self) -> list[dict[str, Any]]:
        """Rows with the numbers of callbacks since the last call."""
        return [row for callback in self._callbacks for row in callback.take_rows()]

    def end(self, summary: Mapping[str, Any]) -> list[str]:
        """Show the callbacks the summary, when their threads have ended; what went wrong."""
        return [problem for callback in self._callbacks if (problem := callback.end(summary))]

    def close(
        self, say: Callable[[str], None] = lambda words: None, *, is_hurried: Callable[[], bool] = lambda: False
    ) -> list[SinkNews]:
        """End all threads, and return the last news of each.

        Args:
            say: shows the user what is waited for.
            is_hurried: whether to wait no longer; rows that are not written by then are lost.
        """
        for thread in self._threads:
            thread.ask_to_close()
        started_s, is_said = time.monotonic(), False
        while running := [thread for thread in self._threads if not thread.has_ended()]:
            waited_s = time.monotonic() - started_s
            running = [thread for thread in running if waited_s < thread.grace_s]
            if not running or is_hurried():
                break
            if waited_s >= SAY_S and not is_said:
                is_said = True
                names = ", ".join(thread.name for thread in running)
                most_s = max(thread.grace_s for thread in running)
                say(f"waiting for metrics to be written: {names} (at most {most_s:g} s)")
            running[0].has_ended(LOOK_S)
        return [thread.closed() for thread in self._threads]

    def counts(self) -> dict[str, dict[str, int]]:
        """Rows written and lost, by sink."""
        return {thread.name: {"written": thread.written, "lost": thread.lost} for thread in self._threads}


def absent(name: str, remedy: str, *, package: str = "") -> UserError:
    """The error for a sink whose package is not installed. package: its name, if it is not the sink's."""
    return UserError(f"the package {package or name} is not installed", where=f"metrics.{name}", remedy=remedy)
