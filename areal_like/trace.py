"""One timeline of a run: events in Chrome's trace format, which Perfetto opens.

Each process writes a buffered, bounded file; `merge_traces` joins the files. The states of a process are in
state_lane.py. Times are wall-clock, so that processes line up; within a process they come from the monotonic clock with
one fixed offset, so that a span never has a negative length. They are written in whole microseconds: readers round
fractions of such large numbers, and adjacent slices would overlap. A process that is killed loses its last second of
events.

A process writes at most `max_events`; a quarter of them is reserved for its main lane. In a run that is too long for
that, individual samples are drawn only for every N-th group, the same groups in all processes (`draws`), so that arrows
stay complete.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from areal_like.config import TraceSettings

FLUSH_S = 1.0
FLUSH_EVENTS = 512
MAIN_LANE = "main"
DETAIL_SHARE = 0.75
"""Share of all events that any lane may use; the rest is reserved for the main lane."""
SHORT_S = 1e-3
"""Slices of the main lane shorter than this are omitted once half of the events are used."""
ARROW = "sample"
"""Category of the arrows from a sample's generation through its score to the step that used it."""
MAX_LINE_BYTES = 1 << 16
_json = msgspec.json.Encoder(enc_hook=str)


class _Event(msgspec.Struct, omit_defaults=True):
    """One line, with Chrome's field names. tid and id are set when it is written."""

    ph: str
    name: str
    pid: int
    ts: int | None = None
    tid: int = -1
    dur: int | None = None
    s: str | None = None
    bp: str | None = None
    cat: str | None = None
    id: str | None = None
    args: dict[str, Any] | None = None


def arrow_name(group_id: int, sample_index: int, *, is_eval: bool = False) -> str:
    """Name of a sample on the timeline; training and evaluation groups are numbered separately."""
    return f"{'e' if is_eval else 'g'}{group_id}.{sample_index}"


def move_name(group_id: int, sample_index: int, num_tokens: int) -> str:
    """Name of one move of a training sample between two workers; the number of tokens differs between its moves."""
    return f"m{group_id}.{sample_index}.{num_tokens}"


def _flow_id(arrow: str) -> str:
    """The arrow's id as a hexadecimal number; Perfetto drops arrows with other ids."""
    if arrow.startswith("m"):
        group, sample, num_tokens = (int(part) for part in arrow[1:].split("."))
        return f"{1 << 62 | group << 34 | sample << 20 | num_tokens:#x}"
    group_id, _, sample_index = arrow[1:].partition(".")
    return f"{int(group_id) << 20 | int(sample_index):#x}"


class Tracer:
    """Appends events of one process to `path`, one JSON object per line. Safe to call from any thread."""

    def __init__(self, path: Path, process: str, *, max_events: int = 500_000, every_group: int = 1) -> None:
        """`process` names the lane in the timeline; a restarted process of the same name continues it.

        At most `max_events` are written (about 150 bytes each), including those of earlier processes of this name; the
        rest is counted in `num_dropped`. With 0 there is no trace file.
        """
        self.is_on = max_events > 0
        self._pid = zlib.crc32(process.encode()) & 0x7FFFFFFF
        self._every_group = every_group
        self._max_events, self._max_details = max_events, int(DETAIL_SHARE * max_events)
        self.num_dropped = 0
        self._anchor_s = time.time() - time.monotonic()
        self._lanes: dict[str, int] = {}
        self._pending: deque[tuple[_Event, str]] = deque()
        """Events and their lanes, oldest first. They are encoded in bulk: between two tokens, with cold caches,
        encoding would take several times as long."""
        self._flushed_s = time.monotonic()
        self._lock = threading.Lock()
        if self.is_on:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._num_events = self._num_details = _num_lines(path)
            self._file = path.open("ab")
            self._write([_Event("M", "process_name", self._pid, tid=0, args={"name": process})])

    @classmethod
    def of(cls, run_dir: str | Path, process: str, settings: TraceSettings) -> Tracer:
        """The tracer of one process of a run."""
        path = Path(run_dir) / "logs" / f"{process}.trace.jsonl"
        return cls(path, process, max_events=settings.max_events, every_group=settings.every_group)

    def now_s(self) -> float:
        """Wall-clock seconds that never decrease, as `complete` expects."""
        return self._anchor_s + time.monotonic()

    def wall_s(self, monotonic_s: float) -> float:
        """Convert a reading of time.monotonic() to the clock of `now_s`."""
        return self._anchor_s + monotonic_s

    def draws(self, group_id: int) -> bool:
        """Whether individual samples of this group are on the timeline."""
        return self.is_on and group_id % self._every_group == 0

    @contextmanager
    def span(self, name: str, lane: str = MAIN_LANE, **args: Any) -> Iterator[None]:
        """Record the enclosed code as one slice. Slices of a lane must nest."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.complete(name, start_s, self.now_s(), lane, **args)

    def complete(self, name: str, start_s: float, end_s: float, lane: str = MAIN_LANE, **args: Any) -> None:
        """Record a slice, with its start and end in wall-clock seconds of `now_s`."""
        if self.is_on:
            start_us, end_us = int(start_s * 1e6), int(end_s * 1e6)
            self._put(_Event("X", name, self._pid, start_us, dur=max(end_us - start_us, 0), args=args or None), lane)

    def instant(self, name: str, lane: str = MAIN_LANE, **args: Any) -> None:
        """Record an event without duration."""
        if self.is_on:
            self._put(_Event("i", name, self._pid, int(self.now_s() * 1e6), s="t", args=args), lane)

    def arrow_start(self, arrow: str, at_s: float, lane: str = MAIN_LANE) -> None:
        """Start an arrow at the slice that covers `at_s` in `lane`, the innermost if slices nest."""
        self._arrow("s", arrow, at_s, lane)

    def arrow_step(self, arrow: str, at_s: float, lane: str = MAIN_LANE) -> None:
        """Continue an arrow at the slice that covers `at_s` in `lane`."""
        self._arrow("t", arrow, at_s, lane)

    def arrow_end(self, arrow: str, at_s: float, lane: str = MAIN_LANE) -> None:
        """End an arrow at the slice that covers `at_s` in `lane`."""
        self._arrow("f", arrow, at_s, lane, bp="e")

    def _arrow(self, phase: str, arrow: str, at_s: float, lane: str, bp: str | None = None) -> None:
        if self.is_on:
            self._put(_Event(phase, arrow, self._pid, int(at_s * 1e6), bp=bp, cat=ARROW), lane)

    def counter(self, name: str, value: float) -> None:
        """Record a value of a counter, which is drawn as a curve."""
        if self.is_on:
            now_us = int(self.now_s() * 1e6)
            self._put(_Event("C", name, self._pid, now_us, args={"value": value}), MAIN_LANE)

    def flush(self) -> None:
        """Write pending events to the file."""
        with self._lock:
            self._flushed_s = time.monotonic()
            ready: list[_Event] = []
            while self._pending:  # other threads may add events; popleft takes each event once
                event, lane = self._pending.popleft()
                if not self._has_room(event, lane):
                    continue
                event.tid = self._lane(lane, ready)
                if event.cat == ARROW:
                    event.id = _flow_id(event.name)
                ready.append(event)
            if self.is_on and ready and not self._file.closed:
                self._write(ready)

    def close(self) -> None:
        """Write pending events and close the file."""
        if not self.is_on:
            return
        self.flush()
        with self._lock:
            if self.num_dropped and not self._file.closed:
                args = {"labels": f"{self.num_dropped} events dropped"}
                self._write([_Event("M", "process_labels", self._pid, tid=0, args=args)])
            self._file.close()

    def _put(self, event: _Event, lane: str) -> None:
        self._pending.append((event, lane))
        if len(self._pending) >= FLUSH_EVENTS or time.monotonic() - self._flushed_s > FLUSH_S:
            self.flush()

    def _has_room(self, event: _Event, lane: str) -> bool:
        """Count an event as written or as dropped. Short slices of a lane that is half full are not counted."""
        is_main = lane == MAIN_LANE
        if event.dur is not None and is_main and event.dur < SHORT_S * 1e6 and self._num_events > self._max_events // 2:
            return False
        is_detail = not is_main or event.cat == ARROW
        if self._num_events >= self._max_events or (is_detail and self._num_details >= self._max_details):
            self.num_dropped += 1
            return False
        self._num_events += 1
        self._num_details += is_detail
        return True

    def _write(self, events: list[_Event]) -> None:
        self._file.write(_json.encode_lines(events))
        self._file.flush()

    def _lane(self, lane: str, ready: list[_Event]) -> int:
        """Number of a lane; for a new lane, an event with its name is added first."""
        number = self._lanes.get(lane)
        if number is None:
            number = self._lanes[lane] = len(self._lanes) + 1
            ready.append(_Event("M", "thread_name", self._pid, tid=number, args={"name": lane}))
        return number


def _num_lines(path: Path) -> int:
    """Number of lines of a file, counted in blocks; 0 if it does not exist."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return 0


def merge_traces(run_dir: Path) -> Path:
    """Join <run>/logs/*.trace.jsonl into <run>/trace.json and return its path. Incomplete lines are omitted.

    One line is in memory at a time.
    """
    target = run_dir / "trace.json"
    temporary = target.with_name(".trace.json.tmp")
    num_broken = 0
    with temporary.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for source in sorted((run_dir / "logs").glob("*.trace.jsonl")):
            with source.open("rb") as lines:
                for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                    if _is_event(line):
                        out.write(separator + line.rstrip())
                        separator = b",\n"
                    else:
                        num_broken += 1
        out.write(b'\n],"otherData":{"broken_lines":%d}}\n' % num_broken)
    os.replace(temporary, target)
    return target


class _AnyEvent(msgspec.Struct):
    ph: str
    name: str


_event_decoder = msgspec.json.Decoder(_AnyEvent)


def _is_event(line: bytes) -> bool:
    try:
        _event_decoder.decode(line)
    except msgspec.MsgspecError:
        return False
    return True
