"""One timeline of a run: events in Chrome's trace format, opened with Perfetto.

Owns: a buffered, bounded event writer per process, and joining the files of all processes. Refuses: aggregates (those
are metrics). Times are wall-clock, so that processes line up; within a process they come from the monotonic clock
anchored once, so that a span never has a negative length. A process killed by force loses its last second of events.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

FLUSH_S = 1.0
FLUSH_EVENTS = 512
MAIN_LANE = "main"
_json = msgspec.json.Encoder(enc_hook=str)


class Tracer:
    """Appends events of one process to `path`, one JSON object per line. Safe to call from any thread."""

    def __init__(self, path: Path, process: str, *, max_events: int = 500_000) -> None:
        """`process` names the lane in the timeline; a restarted process of the same name continues it.

        At most `max_events` are written (bounded disk: about 150 bytes each); the rest is counted in `num_dropped`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._pid = zlib.crc32(process.encode()) & 0x7FFFFFFF
        self._max_events, self._num_events, self.num_dropped = max_events, 0, 0
        self._anchor_s = time.time() - time.monotonic()
        self._lanes: dict[str, int] = {}
        self._buffer: list[dict[str, Any]] = []
        self._flushed_s = time.monotonic()
        self._lock = threading.RLock()
        self._emit({"ph": "M", "name": "process_name", "pid": self._pid, "tid": 0, "args": {"name": process}})

    def now_s(self) -> float:
        """Wall-clock seconds that never go back; what `complete` expects."""
        return self._anchor_s + time.monotonic()

    @contextmanager
    def span(self, name: str, lane: str = MAIN_LANE, **args: Any) -> Iterator[None]:
        """The enclosed code as one slice. Slices of a lane must nest."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.complete(name, start_s, self.now_s(), lane, **args)

    def complete(self, name: str, start_s: float, end_s: float, lane: str = MAIN_LANE, **args: Any) -> None:
        """A slice measured elsewhere, in wall-clock seconds (`now_s` or `time.time`)."""
        event: dict[str, Any] = {"ph": "X", "name": name, "ts": start_s * 1e6, "dur": max(end_s - start_s, 0.0) * 1e6}
        if args:
            event["args"] = args
        self._put(event, lane)

    def instant(self, name: str, lane: str = MAIN_LANE, **args: Any) -> None:
        """A moment."""
        self._put({"ph": "i", "s": "t", "name": name, "ts": self.now_s() * 1e6, "args": args}, lane)

    def flow_start(self, flow_id: int | str, lane: str = MAIN_LANE, name: str = "sample") -> None:
        """An arrow leaves the slice that is open now in `lane`. The other end has the same id and name, anywhere."""
        self._put({"ph": "s", "cat": name, "name": name, "id": str(flow_id), "ts": self.now_s() * 1e6}, lane)

    def flow_end(self, flow_id: int | str, lane: str = MAIN_LANE, name: str = "sample") -> None:
        """The arrow arrives at the slice that is open now in `lane`."""
        event = {"ph": "f", "bp": "e", "cat": name, "name": name, "id": str(flow_id), "ts": self.now_s() * 1e6}
        self._put(event, lane)

    def counter(self, name: str, value: float) -> None:
        """A curve."""
        self._put({"ph": "C", "name": name, "ts": self.now_s() * 1e6, "args": {"value": value}}, MAIN_LANE)

    def flush(self) -> None:
        """Hand buffered events to the operating system."""
        with self._lock:
            self._flushed_s = time.monotonic()
            if self._buffer and not self._file.closed:
                lines = b"".join(_json.encode(event) + b"\n" for event in self._buffer)
                self._file.write(lines)
                self._file.flush()
            self._buffer.clear()

    def close(self) -> None:
        """Write what is left."""
        with self._lock:
            if self.num_dropped:
                args = {"labels": f"{self.num_dropped} events dropped"}
                self._emit({"ph": "M", "name": "process_labels", "pid": self._pid, "tid": 0, "args": args})
            self.flush()
            self._file.close()

    def _put(self, event: dict[str, Any], lane: str) -> None:
        with self._lock:
            if self._num_events >= self._max_events:
                self.num_dropped += 1
                return
            self._num_events += 1
            event["pid"], event["tid"] = self._pid, self._lane(lane)
            self._emit(event)
            if len(self._buffer) >= FLUSH_EVENTS or time.monotonic() - self._flushed_s > FLUSH_S:
                self.flush()

    def _lane(self, lane: str) -> int:
        number = self._lanes.get(lane)
        if number is None:
            number = self._lanes[lane] = len(self._lanes) + 1
            self._emit({"ph": "M", "name": "thread_name", "pid": self._pid, "tid": number, "args": {"name": lane}})
        return number

    def _emit(self, event: dict[str, Any]) -> None:
        self._buffer.append(event)


def merge_traces(run_dir: Path) -> Path:
    """Join <run>/logs/*.trace.jsonl into <run>/trace.json and return its path. Lines cut by a crash are left out."""
    target = run_dir / "trace.json"
    temporary = target.with_name(".trace.json.tmp")
    num_broken = 0
    with temporary.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for source in sorted((run_dir / "logs").glob("*.trace.jsonl")):
            with source.open("rb") as lines:
                for line in lines:
                    if _is_event(line):
                        out.write(separator + line.rstrip())
                        separator = b",\n"
                    else:
                        num_broken += 1
        out.write(b'\n],"otherData":{"broken_lines":%d}}\n' % num_broken)
    os.replace(temporary, target)
    return target


class _Event(msgspec.Struct):
    ph: str
    name: str


_event_decoder = msgspec.json.Decoder(_Event)


def _is_event(line: bytes) -> bool:
    try:
        _event_decoder.decode(line)
    except msgspec.MsgspecError:
        return False
    return True
