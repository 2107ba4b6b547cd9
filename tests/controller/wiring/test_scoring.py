"""Scoring a file of rows is one order with all that was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.wiring import scoring
from services.reward.score_file import ScoreSpec, ScoreStatus


def test_everything_that_is_asked_is_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    standing = ScoreStatus(num_rows=3)
    monkeypatch.setattr(scoring, "score_file", lambda order, show: made.append((order, show)) or standing)
    options, show = {"a": 1}, made.append
    found = scoring.score_rows(
        "math", options, Path("in"), Path("out"), num_workers=5, timeout_s=7.0, overwrite=True, show=show
    )
    assert found is standing
    order = ScoreSpec(
        kind="math", source=Path("in"), target=Path("out"), num_workers=5, options={"a": 1}, timeout_s=7.0,
        overwrite=True,
    )  # fmt: skip
    assert made == [(order, show)]
    assert made[0][0].options is not options
