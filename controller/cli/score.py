"""`areal-like score`: verdicts for a file of answers, without a run.

Contains the scorer's options, the progress bar and the summary. The rows are scored, and the output is written, in the
services package (controller/wiring/scoring.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from areal_like.errors import OperationError, UserError
from controller.config.yaml_document import parse_value
from controller.launch.environments import child_environment
from controller.wiring.process_specs import num_cores
from controller.wiring.scoring import ScoreStatus, score_rows

LINE_EVERY_S = 5.0
"""Seconds between two lines of progress if the output is not a terminal."""


def score(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status. Raises UserError, OperationError."""
    options = options_of(arguments.options)
    set_environment()
    progress = ScoreProgress()
    with progress:
        try:
            standing = score_rows(
                arguments.scorer,
                options,
                Path(arguments.input).expanduser(),
                target := Path(arguments.output).expanduser(),
                num_workers=arguments.workers or num_cores(),
                timeout_s=arguments.timeout,
                overwrite=arguments.overwrite,
                show=progress.show,
            )
        except OSError as error:
            where = str(error.filename or arguments.output)
            raise OperationError(
                f"{where}: {error.strerror or error}; after fixing the cause, run the same command again to continue"
            ) from error
    sys.stdout.write(summary(standing, target))
    return 128 + standing.stopped_by if standing.stopped_by else 0


def set_environment() -> None:
    """Set the environment of the scoring processes. A module of the current folder can be a scorer, but cannot shadow a
    module of this program."""
    os.environ.update(child_environment(1, user_path=Path.cwd()), PYTHONSAFEPATH="1")


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs with YAML values. Raises UserError."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise UserError(
                f"scorer option `{pair}` is not of the form key=value", remedy="write, for example, gold_field=answer"
            )
        options[key.strip()] = parse_value(value)
    return options


def summary(standing: ScoreStatus, target: Path) -> str:
    """The results in a few lines."""
    totals = standing.totals
    num_new = totals.num_rows - standing.num_before
    rate = f", {num_new / standing.wall_s:,.1f} rows/s" if standing.wall_s > 0 else ""
    before = f" ({standing.num_before:,} of them from an earlier invocation)" if standing.num_before else ""
    lines = [f"{totals.num_rows:,} of {standing.num_rows:,} rows have a verdict{before}{rate}"]
    for kind, count in totals.counts.items():
        if count or kind == "scored":
            lines.append(f"  {kind:<10} {count:>8,}")
    if totals.mean_value is not None:
        lines.append(f"  mean value {totals.mean_value:>8.4f} over the scored rows")
    if totals.first_fault:
        lines.append(f"first row without a score: {totals.first_fault}")
    if standing.stopped_by:
        lines.append("interrupted: run the same command again to continue from here")
    return "\n".join([*lines, f"verdicts: {target}", ""])


class ScoreProgress:
    """Shows progress on stderr: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._reported_s = time.monotonic()

    def __enter__(self) -> ScoreProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("score"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._bar.add_task("score", total=None, rate="loading the scorer")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, standing: ScoreStatus) -> None:
        """Show the current progress; may be called at any rate."""
        num_done = standing.totals.num_rows
        num_new = num_done - standing.num_before
        rate = num_new / standing.wall_s if standing.wall_s > 0 else 0.0
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=num_done, total=standing.num_rows, rate=f"{rate:,.0f}/s")
            return
        now_s = time.monotonic()
        if now_s - self._reported_s < LINE_EVERY_S:
            return
        self._reported_s = now_s
        left = f", about {(standing.num_rows - num_done) / rate:,.0f} s left" if rate > 0 else ""
        self._console.print(f"score {num_done:,}/{standing.num_rows:,}  {rate:,.1f}/s{left}", markup=False)
