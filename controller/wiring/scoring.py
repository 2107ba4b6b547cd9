"""Scores rows of a file with the scoring processes of the reward service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.reward.sandbox.demands import sandbox_problems as sandbox_problems
from services.reward.score_file import Order, Standing, score_file


def score_rows(
    scorer: str,
    options: Mapping[str, Any],
    source: Path,
    target: Path,
    *,
    num_workers: int,
    timeout_s: float | None,
    overwrite: bool,
    show: Callable[[Standing], None],
) -> Standing:
    """Score a file of rows in this process, with a pool of scoring processes as children. Raises like `score_file`."""
    order = Order(
        kind=scorer,
        source=source,
        target=target,
        num_workers=num_workers,
        options=dict(options),
        timeout_s=timeout_s,
        overwrite=overwrite,
    )
    return score_file(order, show)
