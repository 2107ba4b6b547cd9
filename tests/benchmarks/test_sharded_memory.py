"""The memory law of sharded ranks, on four real ones: never more than the share and a quarter more than a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.sharded_memory import LIMIT, PHASES, RANKS, SMALL, measure
from benchmarks.storage_accounting import LiveStorages

BUCKET_MB = 1.0


@pytest.mark.thorough
@pytest.mark.e2e
def test_no_rank_ever_holds_more_than_its_share_and_one_and_a_quarter_buckets(tmp_path: Path) -> None:
    found = measure(tmp_path, SMALL, bucket_mb=BUCKET_MB)
    rows = [row for row in found["rows"] if row["phase"] in PHASES]
    assert {(row["phase"], row["rank"]) for row in rows} == {(one, rank) for one in PHASES for rank in range(RANKS)}
    assert found["model_mb"] > 40 * BUCKET_MB, "a whole model would be far above the limit"
    worst = max(rows, key=lambda row: row["over_buckets"])
    assert worst["over_buckets"] <= LIMIT, worst
    assert min(row["over_buckets"] for row in rows) > -LIMIT, "the share is what is held, not a generous bound"


@pytest.fixture
def ledger() -> LiveStorages:
    return LiveStorages()


def test_ledger_counts_live_storages_once_and_the_peak_between(ledger: LiveStorages) -> None:
    ledger.phase("one")
    start = ledger.live_bytes()
    tensor = torch.zeros(1000, dtype=torch.uint8)
    ledger.see(tensor, tensor[3:], [tensor.view(10, 100)])
    assert ledger.live_bytes() - start == 1000
    other = torch.zeros(500, dtype=torch.uint8)
    ledger.see({"other": other})
    del other
    ledger.see(tensor)
    assert ledger.live_bytes() - start == 1000
    assert ledger.peaks["one"] - ledger.starts["one"] == 1500


def test_ledger_sees_storages_that_shrink_in_place_and_forgets_the_phase_before(ledger: LiveStorages) -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8)
    ledger.phase("full")
    full = ledger.starts["full"]
    tensor.untyped_storage().resize_(0)
    ledger.phase("empty")
    assert full - ledger.starts["empty"] == 4096
    assert ledger.peaks["empty"] < ledger.peaks["full"]


def test_ledger_counts_nothing_in_a_phase_that_is_left_out(ledger: LiveStorages) -> None:
    ledger.phase("step", is_counted=False)
    ledger.see(torch.zeros(10))
    assert ledger.peaks == {}
