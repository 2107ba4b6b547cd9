"""One timeline of a run: events in Chrome's trace format, opened with Perfetto.

Owns: a buffered, bounded event writer per process, joining the files of all processes, the names of arrows. Refuses:
aggregates (those are metrics), the states of a process (state_lane.py). Times are wall-clock, so that processes line
up; within a process they come from the monotonic clock anchored once, so that a span never has a negative length. They
are written in whole microseconds: fractions of so large a number are rounded by readers, and slices that touch would
overlap there. A process killed by force loses its last second of events.

Bounded: a process writes at most `max_events`, a quarter of them kept for its main lane. A run too long for that is
drawn whole but thinner: single samples only of every N-th group, the same ones in all processes (`draws`), so
that arrows stay whole.
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
"""Of all events; what is beyond goes to the main lane alone, which says what the process as a whole does."""
SHORT_S = 1e-3
"""Slices of the main lane shorter than this are left out once half of the events are used."""
ARROW = "sample"
"""Category of the arrows from a sample's generation through its score to the step that used it."""
MAX_LINE_BYTES = 1 << 16
_json = msgspec.json.Encoder(enc_hook=str)


class _Event(msgspec.Struct, omit_defaults=True):
    """One line, in Chrome's names. tid and id are filled in when it is written."""

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
    """Names a sample on the timeline; group ids of training and evaluation count separately."""
    return f"{'e' if is_eval else 'g'}{group_id}.{sample_index}"


def move_name(group_id: int, sample_index: int, num_tokens: int) -> str:
    """Names one move of a training sample between two workers: an answer is handed over with so many tokens once."""
    return f"m{group_id}.{sample_index}.{num_tokens}"


def _flow_id(arrow: str) -> str:
    """The same as a number in hexadecimal: Perfetto takes no other ids of arrows, and drops those it cannot read."""
    if arrow.startswith("m"):
        group, sample, num_tokens = (int(part) for part in arrow[1:].split("."))
        return f"{1 << 62 | group << 34 | sample << 20 | num_tokens:#x}"
    group_id, _, sample_index = arrow[1:].partition(".")
    return f"{int(group_id) << 20 | int(sample_index):#x}"


class Tracer:
    """Appends events of one process to `path`, one JSON object per line. Safe to call from any thread."""

    def __init__(self, path: Path, process: str, *, max_events: int = 500_000, every_group: int = 1) -> None:
        """`process` names the lane in the timeline; a restarted process of the same name continues it.

        At most `max_events` are written, those of predecessors included (bounded disk: about 150 bytes each); the rest
        is counted in `num_dropped`. With 0 there is no trace, and no file.
        """
        self.is_on = max_events > 0
        self._pid = zlib.crc32(process.encode()) & 0x7FFFFFFF
        self._every_group = every_group
        self._max_events, self._max_details = max_events, int(DETAIL_SHARE * max_events)
        self.num_dropped = 0
        self._anchor_s = time.time() - time.monotonic()
        self._lanes: dict[str, int] = {}
        self._pending: deque[tuple[_Event, str]] = deque()
        """Events and their lanes, oldest first. Encoding waits for many: between two tokens, with caches full of other
        things, it would cost a multiple."""
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
        """Wall-clock seconds that never go back; what `complete` expects."""
        return self._anchor_s + time.monotonic()

    def wall_s(self, monotonic_s: float) -> float:
        """A reading of time.monotonic() as `now_s` would have given it."""
        return self._anchor_s + monotonic_s

    def draws(self, group_id: int) -> bool:
        """Single samples of this group are on the timeline."""
        return self.is_on and group_id % self._every_group == 0

    @contextmanager
    def span(self, name: str, lane: str = MAIN_LANE, **args: Any) -> Iterator[None]:
        """The enclosed code as one slice. Slices of a lane must nest."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.complete(name, start_s, self.now_s(), lane, **args)

    def complete(self, name: str, start_s: float, end_s: float, lane: str = MAIN_LANE, **args: Any) -> None:
        """A slice measured elsewhere, in wall-clock seconds of `now_s`."""
        if self.is_on:
            start_us, end_us = int(start_s * 1e6), int(end_s * 1e6)
            self._put(_Event("X", name, self._pid, start_us, dur=max(end_us - start_us, 0), args=args or None), lane)

    def instant(self, name: str, lane: str = MAIN_LANE, **args: Any) -> None:
        """A moment."""
        if self.is_on:
            self._put(_Event("i", name, self._pid, int(self.now_s() * 1e6), s="t", args=args), lane)

    def arrow_start(self, arrow: str, at_s: float, lane: str = MAIN_LANE) -> None:
        """An arrow leaves the slice that covers `at_s` in `lane`, the innermost where slices nest."""
        self._arrow("s", arrow, at_s, lane)

    def arrow_step(self, arrow: str, at_s: float, lane: str = MAIN_LANE) -> None:
        """It passes through the slice that covers `at_s` in `lane`."""
        self._arrow("t", arrow, at_s, lane)

    def arrow_end(self, arrow: str, at_s: float, lane: str = MAIN_LANE) -> None:
        """It arrives at the slice that covers `at_s` in `lane`."""
        self._arrow("f", arrow, at_s, lane, bp="e")

    def _arrow(self, phase: str, arrow: str, at_s: float, lane: str, bp: str | None = None) -> None:
        if self.is_on:
            self._put(_Event(phase, arrow, self._pid, int(at_s * 1e6), bp=bp, cat=ARROW), lane)

    def counter(self, name: str, value: float) -> None:
        """A curve."""
        if self.is_on:
            now_us = int(self.now_s() * 1e6)
            self._put(_Event("C", name, self._pid, now_us, args={"value": value}), MAIN_LANE)

    def flush(self) -> None:
        """Hand what is pending to the operating system."""
        with self._lock:
            self._flushed_s = time.monotonic()
            ready: list[_Event] = []
            while self._pending:  # other threads may go on putting; popleft takes each event once
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
        """Write what is left."""
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
        """Count an event as written, or as dropped (short slices of a lane that is half full are neither)."""
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
        """Its number; a new lane says its name first."""
        number = self._lanes.get(lane)
        if number is None:
            number = self._lanes[lane] = len(self._lanes) + 1
            ready.append(_Event("M", "thread_name", self._pid, tid=number, args={"name": lane}))
        return number


def _num_lines(path: Path) -> int:
    """Lines in a file, counted in blocks; 0 when there is none."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return 0


def merge_traces(run_dir: Path) -> Path:
    """Join <run>/logs/*.trace.jsonl into <run>/trace.json and return its path. Lines cut by a crash are left out.

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
