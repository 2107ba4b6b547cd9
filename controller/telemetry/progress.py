"""Progress of an activity and its estimated remaining time, as a line and as a bar on a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_like.plain_text import one_line
from controller.coordinator.snapshot import EvaluationUnderWay
from controller.run_folder.formatting import megabytes, span

PACE_LOOKS = 100
"""Number of newest readings used to estimate the rate of an evaluation."""
WIDEST_BAR = 40
NARROWEST_BAR = 6
WIDTH_FOR_NOTES = 90
"""Width of a terminal below which a bar is shown without its note."""


@dataclass(frozen=True)
class Progress:
    """One activity of a run."""

    label: str
    done: float = 0
    total: float | None = None
    """Total; None: unknown, and no bar is shown."""
    left_s: float | None = None
    """Estimated seconds to its end; None: unknown."""
    note: str = ""
    is_bytes: bool = False
    """`done` and `total` are bytes."""

    @property
    def count(self) -> str:
        """Text such as `150/300` or `12 MB of 1.4 GB`, or only the amount done."""
        if self.is_bytes:
            done = megabytes(self.done / 1e6)
            return f"{done} of {megabytes(self.total / 1e6)}" if self.total else done
        if self.total is None:
            return f"{self.done:.0f}" if self.done else ""
        return f"{self.done:.0f}/{self.total:.0f}"

    @property
    def left(self) -> str:
        """Text such as `12 s left`; empty if unknown, and at the end."""
        is_over = self.total is not None and self.done >= self.total
        return "" if self.left_s is None or is_over else f"{span(self.left_s)} left"

    def line(self) -> str:
        """The progress as one plain line."""
        head = " ".join(filter(None, (self.label, self.count)))
        return one_line("  ".join(filter(None, (head, self.note, self.left))))


def bars(progress: Sequence[Progress], width: int) -> Table:
    """One line for each: label, bar, count, time left and, if the width suffices, the note."""
    has_notes = width >= WIDTH_FOR_NOTES
    texts = [(one_line(one.label), one.count, one.left, one_line(one.note) if has_notes else "") for one in progress]
    taken = sum(max(len(line[column]) for line in texts) + 1 for column in range(4)) if texts else 0
    bar_width = max(NARROWEST_BAR, min(WIDEST_BAR, width - taken - 1))
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(5):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for one, (label, count, left, note) in zip(progress, texts, strict=True):
        bar = ProgressBar(one.total, min(one.done, one.total), width=bar_width) if one.total else Text("")
        table.add_row(Text(label), bar, Text(count), Text(left), Text(note, style="dim"))
    return table


class EvaluationBars:
    """Progress of the evaluations in progress, each with its own rate."""

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}

    def progress(self, under_way: Sequence[EvaluationUnderWay], now_s: float) -> list[Progress]:
        """Progress of each evaluation; call it regularly."""
        self._paces = {one.version: self._paces.get(one.version) or Pace(PACE_LOOKS) for one in under_way}
        found = []
        for one in under_way:
            pace = self._paces[one.version]
            pace.at(now_s, one.num_done)
            left_s = pace.left_s(now_s, one.num_rows - one.num_done)
            found.append(Progress(f"evaluation of version {one.version}", one.num_done, one.num_rows, left_s))
        return found


class Pace:
    """Estimates the remaining time from the newest counts."""

    def __init__(self, num_kept: int) -> None:
        """num_kept: number of newest counts used for the estimate."""
        self._counts: deque[tuple[float, float]] = deque(maxlen=num_kept + 1)

    def at(self, now_s: float, done: float) -> None:
        """Record the count at `now_s`."""
        self._counts.append((now_s, done))

    def left_s(self, now_s: float, left: float) -> float | None:
        """Estimated seconds until `left` more are done; None without progress."""
        if len(self._counts) < 2:
            return None
        (first_s, first), (last_s, last) = self._counts[0], self._counts[-1]
        if last <= first:
            return None
        return max(0.0, max(0.0, left) * (last_s - first_s) / (last - first) - (now_s - last_s))
