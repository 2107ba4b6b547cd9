"""What a running job shows: a live table on a terminal, plain lines anywhere else.

Owns: words and layout. Refuses: collecting numbers (summary.py), deciding anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from areal_like.plain_text import one_line

Level = Literal["info", "warning", "error"]
_STYLE: Mapping[str, str] = {"info": "", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class StepRow:
    """One finished step, as shown."""

    step: int
    num_steps: int
    reward: float
    loss: float
    grad_norm: float
    staleness_mean: float
    staleness_max: int
    rollout_tokens_per_s: float
    trainer_tokens_per_s: float
    wait_share: float
    """Share of the last interval that the trainer waited."""
    is_replay: bool = False

    def line(self) -> str:
        """The step as one plain line."""
        note = " (replayed)" if self.is_replay else ""
        return (
            f"step {self.step}/{self.num_steps}{note}  reward {self.reward:.3f}  loss {self.loss:+.4f}  "
            f"grad {self.grad_norm:.3f}  staleness {self.staleness_mean:.2f} (max {self.staleness_max})  "
            f"rollout {self.rollout_tokens_per_s:,.0f} tok/s  trainer {self.trainer_tokens_per_s:,.0f} tok/s  "
            f"trainer waited {self.wait_share:.0%}"
        )


@dataclass(frozen=True)
class Snapshot:
    """The state of the run right now."""

    version: int
    waits: Sequence[str]
    states: Mapping[str, str]
    """What each process does, by name."""
    counts: Mapping[str, object]
    elapsed_s: float


@dataclass
class Display:
    """Shows a job. Use as a context manager; every method may be called at any rate."""

    kind: Literal["auto", "live", "plain"] = "auto"
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    _live: Live | None = None
    _rows: deque[StepRow] = field(default_factory=lambda: deque(maxlen=12))
    _accuracy: list[tuple[int, float]] = field(default_factory=list)
    _snapshot: Snapshot | None = None
    progress_text: str = ""
    """What preparation said last; empty once steps come."""

    def __enter__(self) -> Display:
        is_live = self.kind == "live" or (self.kind == "auto" and self.console.is_terminal)
        if is_live:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str, level: Level = "info") -> None:
        """An event in one line; it stays on screen above the live table."""
        self.console.print(Text(f"{time.strftime('%H:%M:%S')} {one_line(text)}", style=_STYLE[level]))

    def progress(self, text: str) -> None:
        """What preparation is doing; replaces the last such line on a terminal."""
        if self._live is None and text != self.progress_text:
            self.console.print(Text(text))
        self.progress_text = text

    def step(self, row: StepRow) -> None:
        """A finished step."""
        self.progress_text = ""
        self._rows.append(row)
        if self._live is None:
            self.console.print(Text(row.line()))

    def accuracy(self, version: int, value: float, num_rows: int) -> None:
        """A finished evaluation."""
        self._accuracy.append((version, value))
        self.note(f"evaluation of version {version}: {value:.3f} on {num_rows} held-out prompts")

    def show(self, snapshot: Snapshot) -> None:
        """The state of the run; drawn on a terminal only."""
        self._snapshot = snapshot

    def _render(self) -> Group:
        parts: list[Table | Text] = []
        if self.progress_text:
            parts.append(Text(self.progress_text))
        if self._rows:
            parts.append(self._steps_table())
        if self._snapshot is not None:
            parts.extend(self._state_lines(self._snapshot))
        return Group(*parts)

    def _steps_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in (
            "step",
            "reward",
            "loss",
            "grad",
            "staleness",
            "rollout tok/s",
            "trainer tok/s",
            "trainer waited",
        ):
            table.add_column(title, justify="right", no_wrap=True)
        for row in tuple(self._rows):  # drawn by a thread of its own, while rows are added
            table.add_row(
                f"{row.step}/{row.num_steps}" + ("*" if row.is_replay else ""),
                f"{row.reward:.3f}",
                f"{row.loss:+.4f}",
                f"{row.grad_norm:.3f}",
                f"{row.staleness_mean:.2f} / {row.staleness_max}",
                f"{row.rollout_tokens_per_s:,.0f}",
                f"{row.trainer_tokens_per_s:,.0f}",
                f"{row.wait_share:.0%}",
            )
        return table

    def _state_lines(self, snapshot: Snapshot) -> list[Text]:
        states = "  ".join(f"{name}: {state}" for name, state in sorted(snapshot.states.items()))
        counts = "  ".join(f"{key} {value}" for key, value in snapshot.counts.items())
        accuracy = "  ".join(f"v{version} {value:.3f}" for version, value in self._accuracy[-6:])
        lines = [
            Text(f"version {snapshot.version}   {snapshot.elapsed_s:.0f} s   {counts}", style="bold"),
            Text(states),
            *(Text(one_line(wait), style="dim") for wait in snapshot.waits),
        ]
        return [*lines, Text(f"accuracy  {accuracy}")] if accuracy else lines
