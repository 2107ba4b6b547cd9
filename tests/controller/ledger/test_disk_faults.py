"""The coordinator and the real ledger on simulated disks: crashes at any change of a file, faults, lost fsync.

`python -m tests.disk_faults` runs as many as wanted.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from disk_cluster import run_on_disk
from disk_ledger import How, LossReported, recorders
from recorded_sqlite import unavailable
from simulated_disk import SimulatedDisk

from controller.ledger import ledger as ledger_module
from controller.ledger.segment_store import SegmentStore

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "-")

LOSSLESS = [("kill", False), ("power", True)]
LOSSY = [("power", False), ("lost_syncs", True)]


def run_all(seeds: range, folder: Path, how: How, fsync: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    with recorders() as recording:
        for seed in seeds:
            place = folder / str(seed)
            place.mkdir(exist_ok=True)
            try:
                found += run_on_disk(seed, place, recording, how=how, fsync=fsync, num_states=5).found
            except LossReported:
                found["reported losses"] += 1
    return found


@pytest.mark.parametrize(("how", "fsync"), LOSSLESS)
def test_a_crash_at_any_change_of_a_file_loses_and_repeats_nothing(how: How, fsync: bool, tmp_path: Path) -> None:
    found = run_all(range(20), tmp_path, how, fsync)
    assert found["crashes"] > 100
    assert found["reported losses"] == 0
    assert min(found["failed transactions"], found["refused openings"], found["retries"]) > 0


@pytest.mark.parametrize(("how", "fsync"), LOSSY)
def test_what_a_disk_loses_without_a_working_fsync_is_reported(how: How, fsync: bool, tmp_path: Path) -> None:
    found = run_all(range(12), tmp_path, how, fsync)
    assert found["facts lost"] > 0
    assert found["reported losses"] > 0


def test_a_seed_repeats_exactly(tmp_path: Path) -> None:
    first, again = (run_all(range(3, 5), tmp_path / name, "kill", False) for name in made(tmp_path, "a", "b"))
    assert first == again


def made(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (folder / name).mkdir()
    return names


def without_flush_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are written after the transaction that refers to them."""
    apply, flush = ledger_module.Ledger.apply, SegmentStore.flush

    def late(self: Any, entries: Any) -> None:
        monkeypatch.setattr(SegmentStore, "flush", lambda store: None)
        try:
            apply(self, entries)
        finally:
            monkeypatch.setattr(SegmentStore, "flush", flush)
        self._segments.flush()

    monkeypatch.setattr(ledger_module.Ledger, "apply", late)


def without_fsync_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.ledger.segment_store.flush_to_disk", lambda path: None)
    monkeypatch.setattr(ledger_module, "flush_to_disk", lambda path: None)


def without_fsync_of_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ledger_module._open
    monkeypatch.setattr(ledger_module, "_open", lambda path, run_id, fsync: whole(path, run_id, False))


def without_comparing_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "CHECK", "PRAGMA quick_check(1)")


@pytest.mark.parametrize(
    ("mutate", "how", "seeds"),
    [
        (without_flush_before_commit, "kill", range(12)),
        (without_fsync_of_folders, "power", range(12)),
        (without_fsync_of_commits, "power", range(6)),
        (without_comparing_indexes, "lost_syncs", range(1, 2)),
    ],
)
def test_every_guard_is_needed(
    mutate: Any, how: How, seeds: range, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(seeds, tmp_path, how, fsync=how != "kill")


def test_a_power_loss_keeps_what_was_synchronised_and_any_part_of_the_rest(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"a" * 2048)
    disk, rng = SimulatedDisk(tmp_path), random.Random(1)
    old, new = disk.file_of("old"), disk.create("new")
    disk.write(old, 0, b"b" * 1024)
    disk.sync(old)
    disk.write(old, 1024, b"c" * 1024)
    disk.write(new, 0, b"d")
    at = len(disk.changes)
    images = [disk.after_power_loss(at, rng).files for _ in range(200)]
    assert {image["old"][:1024] for image in images} == {b"b" * 1024}
    assert {image["old"][1024:] for image in images} == {
        first * 512 + second * 512 for first in (b"a", b"c") for second in (b"a", b"c")
    }
    assert {image.get("new") for image in images} == {None, b"", b"d"}
    disk.sync(new)
    assert None in {disk.after_power_loss(at + 1, rng).files.get("new") for _ in range(50)}, "its name was not kept"
    disk.sync_folder(".")
    assert {disk.after_power_loss(at + 2, rng).files["new"] for _ in range(50)} == {b"d"}
    assert disk.after_kill(at, rng).files == {"old": b"b" * 1024 + b"c" * 1024, "new": b"d"}


def test_data_whose_fsync_failed_may_be_lost_after_a_later_fsync(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    disk, rng = SimulatedDisk(tmp_path), random.Random(1)
    file = disk.file_of("file")
    disk.write(file, 0, b"first")
    disk.sync(file, has_failed=True)
    disk.write(file, 5, b"second")
    disk.sync(file)
    assert {disk.after_power_loss(4, rng).files["file"] for _ in range(100)} == {b"firstsecond", b"\0" * 5 + b"second"}
