"""Claims about reading recorded batches of a run that has ended."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from ledger_entries import admit, finished, lineage, shipped

from areal_like.errors import LedgerError
from controller.ledger.batch_reader import BatchReader
from controller.ledger.ledger import LEDGER_FILE, SEGMENT_FOLDER, Ledger


@pytest.fixture
def reader(tmp_path: Path) -> BatchReader:
    with Ledger(tmp_path, segment_bytes=1) as ledger:
        ledger.apply([lineage(), *(admit(i) for i in range(3)), *(finished(i, [0], float(i)) for i in range(3))])
        ledger.apply([shipped(1, 0), shipped(2, 1), lineage("l1", checkpoint=1), shipped(2, 1, "l1", is_replay=True)])
    return BatchReader(sqlite3.connect(tmp_path / LEDGER_FILE), tmp_path / SEGMENT_FOLDER)


def test_batches_are_those_that_the_trainer_received(reader: BatchReader, tmp_path: Path) -> None:
    batches = reader.batches()
    assert {step: batch.lineage for step, batch in batches.items()} == {1: "l0", 2: "l1"}
    with Ledger(tmp_path, cache_bytes=0) as ledger:
        for batch in batches.values():
            (ours,), (theirs,) = reader.samples(batch), ledger.batch_samples(batch.groups)
            assert (ours.group_id, ours.sample_index, ours.reward) == (
                theirs.group_id,
                theirs.sample_index,
                theirs.reward,
            )
            assert ours.trajectory.tokens_T.tolist() == theirs.trajectory.tokens_T.tolist()
            assert not ours.is_reused


def test_starts_and_steps_that_were_given_twice(reader: BatchReader) -> None:
    assert reader.starts() == [("l0", 0), ("l1", 1)]
    assert reader.repeated_steps() == {2}


def test_purged_and_damaged_payloads_are_distinguished(reader: BatchReader, tmp_path: Path) -> None:
    batch = reader.batches()[1]
    assert reader.num_purged(batch) == 0
    file = tmp_path / SEGMENT_FOLDER / "000001.seg"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(LedgerError, match="damaged"):
        reader.samples(batch)
    with sqlite3.connect(tmp_path / LEDGER_FILE) as db:
        db.execute("UPDATE samples SET file = NULL WHERE group_id = 0")
    assert reader.num_purged(batch) == 1
    with pytest.raises(LedgerError, match="the tokens of sample 0 of group 0 are no longer stored"):
        reader.samples(batch)
