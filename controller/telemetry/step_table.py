"""Finished steps as lines and as a table that fits the terminal.

Numbers are collected in step_reporter.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from controller.run_folder.formatting import span

GAP = 2
PRIORITY = ("step", "reward", "staleness", "waited", "loss", "rollout", "trainer", "grad")
"""Columns by priority: in a narrow terminal the last ones are left out first."""


@dataclass(frozen=True)
class StepRow:
    """One finished step, as displayed."""

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
    bound: int | None = None
    """Maximum staleness of the run; None: unbounded."""
    left_s: float | None = None
    """Estimated seconds to the last step; None: not known yet."""

    def line(self) -> str:
        """The step as one plain line."""
        note = " (replayed)" if self.is_replay else ""
        left = f"  {span(self.left_s)} left" if self.left_s is not None and self.step < self.num_steps else ""
        return (
            f"step {self.step}/{self.num_steps}{note}  reward {self.reward:.3f}  loss {self.loss:+.4f}  "
            f"grad {self.grad_norm:.3f}  staleness {self.staleness_mean:.2f} (max {self.staleness_max}, "
            f"{bound_words(self.bound)})  rollout {self.rollout_tokens_per_s:,.0f} tok/s  "
            f"trainer {self.trainer_tokens_per_s:,.0f} tok/s  trainer waited {self.wait_share:.0%}{left}"
        )


def bound_words(bound: int | None) -> str:
    """Text such as `bound 2`, or that there is no bound."""
    return "no bound" if bound is None else f"bound {bound}"


def step_table(rows: Sequence[StepRow], width: int) -> Table:
    """The rows, with as many columns as fit into `width`."""
    columns = _columns(rows)
    widths = {name: max(map(len, (title, *cells))) for name, (title, cells) in columns.items()}
    chosen: set[str] = set()
    for name in PRIORITY:
        if sum(widths[one] + GAP for one in (*chosen, name)) - GAP > width and chosen:
            break
        chosen.add(name)
    shown = [columns[name] for name in columns if name in chosen]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), collapse_padding=True)
    for title, _ in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for cells in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*cells)
    return table


def _columns(rows: Sequence[StepRow]) -> dict[str, tuple[str, list[str]]]:
    """Title and cells of each column, in display order."""
    bound = bound_words(rows[-1].bound) if rows else ""
    return {
        "step": ("step", [f"{row.step}/{row.num_steps}{'*' if row.is_replay else ''}" for row in rows]),
        "reward": ("reward", [f"{row.reward:.3f}" for row in rows]),
        "loss": ("loss", [f"{row.loss:+.4f}" for row in rows]),
        "grad": ("grad", [f"{row.grad_norm:.3f}" for row in rows]),
        "staleness": (f"staleness, {bound}", [f"{row.staleness_mean:.2f}, max {row.staleness_max}" for row in rows]),
        "rollout": ("rollout tok/s", [f"{row.rollout_tokens_per_s:,.0f}" for row in rows]),
        "trainer": ("trainer tok/s", [f"{row.trainer_tokens_per_s:,.0f}" for row in rows]),
        "waited": ("trainer waited", [f"{row.wait_share:.0%}" for row in rows]),
    }
