"""Display of a running job: a live table with bars on a terminal, otherwise plain lines.

Decides what is shown when. Numbers are collected in summary.py; step lines are in step_table.py, progress in
progress.py.

Plain lines contain no control characters, and no kind of line is printed more often than every PLAIN_EVERY_S (steps) or
PROGRESS_EVERY_S (the rest); omitted ones are in metrics.jsonl. On a terminal the last table remains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from areal_like.plain_text import one_line
from controller.run_folder.formatting import span
from controller.telemetry.progress import Progress, bars
from controller.telemetry.screen import Screen
from controller.telemetry.step_table import StepRow, step_table

Level = Literal["info", "warning", "error"]
_STYLE: Mapping[str, str] = {"info": "", "warning": "yellow", "error": "bold red"}

PLAIN_EVERY_S = 1.0
PROGRESS_EVERY_S = 5.0
MOST_ROWS = 12
OTHER_LINES = 12
"""Lines of a terminal reserved for everything except the table of steps."""


@dataclass(frozen=True)
class Snapshot:
    """Current state of the run."""

    version: int
    waits: Sequence[str]
    states: Mapping[str, str]
    """State of each process, by name."""
    counts: Mapping[str, object]
    elapsed_s: float
    progress: Sequence[Progress] = ()
    """Progress of the steps, and of evaluations in progress."""
    is_resumed: bool = False
    """`elapsed_s` counts from the last resume."""


@dataclass
class Display:
    """Displays a job. Use as a context manager; every method may be called at any rate."""

    kind: Literal["auto", "live", "plain"] = "auto"
    console: Console = field(default_factory=Screen)
    clock: Callable[[], float] = time.monotonic
    _live: Live | None = None
    _is_over: bool = False
    _rows: deque[StepRow] = field(default_factory=lambda: deque(maxlen=MOST_ROWS))
    _accuracy: list[tuple[int, float]] = field(default_factory=list)
    _snapshot: Snapshot | None = None
    _progress: Progress | None = None
    _shown_s: dict[str, float] = field(default_factory=dict)
    """Time of the last plain line of each kind."""

    @property
    def progress_text(self) -> str:
        """Last progress of the preparation; empty once there are steps."""
        return self._progress.line() if self._progress is not None else ""

    def __enter__(self) -> Display:
        is_live = self.kind == "live" or (self.kind == "auto" and self.console.is_terminal)
        if is_live:
            self._is_over = False
            self.console.soft_wrap = False  # rich must count the lines that it replaces
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._is_over = True
            self._live.transient = not self._rows
            self._live.stop()
            self._live = None
            self.console.soft_wrap = True

    def note(self, text: str, level: Level = "info") -> None:
        """Print an event as one line, which stays above the live table."""
        self.console.print(Text(f"{time.strftime('%H:%M:%S')} {one_line(text)}", style=_STYLE[level]))

    def progress(self, progress: Progress) -> None:
        """Show the progress of the preparation; on a terminal it replaces the previous one."""
        is_news = progress != self._progress
        self._progress = progress
        if self._live is None and is_news:
            is_end = progress.total is not None and progress.done >= progress.total
            self._print_at_most(PROGRESS_EVERY_S, progress.label, progress.line(), is_important=is_end)

    def step(self, row: StepRow) -> None:
        """Show a finished step."""
        self._progress = None
        is_first = not self._rows
        self._rows.append(row)
        if self._live is None:
            is_end = row.step >= row.num_steps
            self._print_at_most(PLAIN_EVERY_S, "step", row.line(), is_important=is_first or is_end)

    def accuracy(self, version: int, metrics: Mapping[str, float], num_rows: int) -> None:
        """Show a finished evaluation, with its metrics by name."""
        value = metrics["accuracy"]
        self._accuracy.append((version, value))
        others = ", ".join(f"{name} {one:.3f}" for name, one in metrics.items() if name != "accuracy")
        what = "answers" if others else "held-out prompts"
        self.note(f"evaluation of version {version}: {value:.3f} on {num_rows:,} {what}{others and f' ({others})'}")

    def show(self, snapshot: Snapshot) -> None:
        """Show the state of the run. Without a terminal only evaluations are shown, which have no other lines."""
        self._snapshot = snapshot
        if self._live is None:
            for one in snapshot.progress[1:]:
                if one.done and one.left_s is not None and one.left_s > PROGRESS_EVERY_S:
                    self._print_at_most(PROGRESS_EVERY_S, one.label, one.line())

    # ------------------------------------------------------------ plain

    def _print_at_most(self, every_s: float, kind: str, line: str, *, is_important: bool = False) -> None:
        now_s = self.clock()
        if is_important or now_s - self._shown_s.get(kind, -every_s) >= every_s:
            self._shown_s[kind] = now_s
            self.console.print(Text(line))

    # ------------------------------------------------------------ live

    def _render(self) -> Group:
        size, parts = self.console.size, list[RenderableType]()
        # Called by rich's thread, while rows are added.
        rows, snapshot, progress = tuple(self._rows), self._snapshot, self._progress
        if rows:
            num_shown = min(MOST_ROWS, max(3, size.height - OTHER_LINES))
            parts.append(step_table(rows[-num_shown:], size.width))
        if self._is_over:
            return Group(*parts)
        going_on = [*([progress] if progress is not None else []), *(snapshot.progress if snapshot else ())]
        if going_on:
            parts.append(bars(going_on, size.width))
        if snapshot is not None:
            parts.extend(self._state_lines(snapshot))
        return Group(*parts)

    def _state_lines(self, snapshot: Snapshot) -> list[Text]:
        states = "  ".join(f"{name}: {state}" for name, state in sorted(snapshot.states.items()))
        counts = "  ".join(f"{key} {value}" for key, value in snapshot.counts.items())
        accuracy = "  ".join(f"v{version} {value:.3f}" for version, value in self._accuracy[-6:])
        elapsed = span(snapshot.elapsed_s) + (" since the resume" if snapshot.is_resumed else "")
        lines = [
            Text(f"version {snapshot.version}   {elapsed}   {counts}", style="bold"),
            Text(one_line(states)),
            *(Text(one_line(wait), style="dim") for wait in snapshot.waits),
        ]
        return [*lines, Text(f"accuracy  {accuracy}")] if accuracy else lines
