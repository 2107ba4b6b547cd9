"""The comparison of answers that are drawn again; no run is started."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import regeneration
from benchmarks.panels import PLOTS
from benchmarks.tables import TABLES
from controller.config.loading import load_config

ROW: dict[str, Any] = {
    "seed": 1, "status": 0, "mixed": 40, "tokens": 2000, "tokens_drawn": 2000, "ties": 2, "largest_tie": 1e-7,
    "different_tokens": 0, "different_logprobs": 0, "different_ends": 0, "largest_gap_nats": 4.5e-6, "samples": 160,
    "versions": 8, "versions_replayed": 7, "tokens_not_compared": {}, "samples_not_compared": {}, "first": None,
    "wall_s": 26.0,
}  # fmt: skip


def test_the_job_is_a_valid_configuration() -> None:
    assert load_config("quickstart", regeneration.JOB).config.num_steps == 30


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        ({}, True),
        ({"ties": 9}, True),
        ({"different_ends": 1, "status": 1}, False),
        ({"tokens_drawn": 1999}, False),
        ({"samples_not_compared": {"purged": 1}}, False),
        ({"tokens_not_compared": {"gone": 1}}, False),
    ],
)
def test_ties_are_allowed_but_every_token_must_be_drawn(change: dict[str, Any], is_equal: bool) -> None:
    row = {**ROW, **change}
    assert regeneration.is_equal(row) is is_equal
    assert f"{row['ties']} ties, {row['different_ends']} other differences" in regeneration.words(row)


def test_table_and_plot_count_ties_apart_from_other_differences() -> None:
    result = {"seeds": [ROW, {**ROW, "seed": 2, "different_logprobs": 3}]}
    assert "4,000 tokens in all, 4 of them ties." in TABLES["regeneration"](result)
    (panel,) = PLOTS["regeneration"](result)
    assert [list(series.values) for series in panel.series] == [[2, 2], [0, 3]]
