"""state.json and seal.json after a crash or a fault at any change of a file."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_files import RecordedFiles
from simulated_disk import Fault, Image, SimulatedDisk

from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE, read_seal, write_seal


def images(disk: SimulatedDisk, rng: random.Random, number: int = 15) -> Iterator[Image]:
    for at in range(len(disk.changes) + 1):
        for _ in range(number):
            yield disk.after_kill(at, rng)
            yield disk.after_power_loss(at, rng)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "a")
    folder.write_state("running")
    return folder


def status_in(image: Image, place: Path) -> str:
    image.write(place)
    status: str = RunFolder(place).read_state()["status"]
    return status


def test_a_crash_at_any_time_leaves_the_old_or_the_new_state(run: RunFolder, tmp_path: Path) -> None:
    with RecordedFiles().installed() as files:
        disk = files.disk = SimulatedDisk(run.root)
        run.write_state("finished")
        files.disk = None
    found = {status_in(image, tmp_path / str(i)) for i, image in enumerate(images(disk, random.Random(1)))}
    assert found == {"running", "finished"}


def test_without_fsync_a_power_loss_would_damage_the_state(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.run_folder.spare_file.flush_to_disk", lambda path: None)
    with pytest.raises(Exception, match="status file is damaged"):
        test_a_crash_at_any_time_leaves_the_old_or_the_new_state(run, tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_disk_that_fails_at_any_time_leaves_the_old_or_the_new_state(
    number: int, is_persistent: bool, run: RunFolder
) -> None:
    with RecordedFiles().installed() as files:
        for after in range(1, 12):
            disk = files.disk = SimulatedDisk(run.root)
            disk.fault = Fault(number, after, is_persistent)
            refused = None
            try:
                run.write_state("failed", reason=str(after))
            except OSError as error:
                refused = error.errno
            assert refused in (None, number)
            assert (run.read_state()["reason"] == str(after)) is (refused is None)
            files.disk = None


def test_a_crash_at_any_time_leaves_no_seal_or_a_whole_one(run: RunFolder, tmp_path: Path) -> None:
    run.config.write_text("name: a\n")
    with RecordedFiles().installed() as files:
        disk = files.disk = SimulatedDisk(run.root)
        write_seal(run, run_id="r", last_digest="d")
        files.disk = None
    whole = json.loads((run.root / SEAL_FILE).read_text())
    found = []
    for number, image in enumerate(images(disk, random.Random(1))):
        image.write(tmp_path / str(number))
        found.append(read_seal(RunFolder(tmp_path / str(number))))
    assert all(seal in (None, whole) for seal in found)
    assert None in found
    assert whole in found
