"""Planted wrong labels: exactly as many as said, and found again by the task's own rule."""

from __future__ import annotations

import json
from pathlib import Path

from areal_like.tasks import running_sum
from benchmarks.label_noise import NUM_ROWS, SHARE_WRONG, planted_rows, wrong_lines


def test_planted_labels_are_those_that_the_rule_rejects(tmp_path: Path) -> None:
    rows = planted_rows(1)
    assert len({row["prompt"] for row in rows}) == len(rows) == NUM_ROWS
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong = wrong_lines(tmp_path / "rows.jsonl")
    assert len(wrong) == round(SHARE_WRONG * NUM_ROWS)
    for number, row in enumerate(rows, 1):
        assert running_sum.is_correct(row, running_sum.solve(row["prompt"])) == (number not in wrong)
    assert planted_rows(1) == rows
    assert planted_rows(2) != rows
