"""The end of a run and its cause are recorded also on a full disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.run_folder.owner_host import whereabouts
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.spare_file import SPARE_BYTES, replace_with_reserve, spare_of

REASON = "/runs/a/ledger.sqlite: No space left on device -> free some disk space, then run areal-like resume"


def fill(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(self: Path, content: bytes) -> int:
        self.touch()  # the directory has room for the name
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_is_replaced_in_reserved_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = tmp_path / "a.json"
    replace_with_reserve(path, b"1")
    assert names(tmp_path) == ["a.json", "a.spare"]
    assert spare_of(path).stat().st_size == SPARE_BYTES
    with monkeypatch.context() as patch:
        fill(patch, number)
        replace_with_reserve(path, b"22")
    assert path.read_bytes() == b"22"
    assert names(tmp_path) == ["a.json"]
    replace_with_reserve(path, b"3")
    assert names(tmp_path) == ["a.json", "a.spare"]  # for the end of the resumed run


def test_without_reserved_space_the_error_is_raised_and_the_file_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    replace_with_reserve(path, b"1")
    spare_of(path).unlink()
    fill(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as found:
        replace_with_reserve(path, b"22")
    assert found.value.filename == str(tmp_path / "a.tmp")
    assert path.read_bytes() == b"1"
    assert names(tmp_path) == ["a.json"]


def test_contents_longer_than_the_reserved_space_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_with_reserve(path, b"1")
    fill(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        replace_with_reserve(path, b"2" * (SPARE_BYTES + 1))
    replace_with_reserve(path, b"2" * SPARE_BYTES)
    assert path.read_bytes() == b"2" * SPARE_BYTES


def test_other_errors_do_not_use_the_reserved_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_with_reserve(path, b"1")
    fill(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        replace_with_reserve(path, b"22")
    assert names(tmp_path) == ["a.json", "a.spare"]


def test_a_run_that_a_full_disk_ended_tells_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "a")
    folder.config.write_text("name: a\n")
    folder.write_state("running", command="train")
    with monkeypatch.context() as patch:
        fill(patch, errno.ENOSPC)
        folder.write_state("failed", reason=REASON)
    where = whereabouts(folder)
    assert where.kind == "failed"
    assert REASON in where.words
    verdict = diagnose(RunData.load(folder))[0]
    assert (verdict.kind, verdict.cause) == ("failed", "disk")
    assert "No space left on device" in verdict.title


ON_A_FULL_DISK = """
import errno, json, sys
from pathlib import Path
from controller.run_folder.run_folder import RunFolder

folder = RunFolder.create(Path(sys.argv[1]), "a")
folder.write_state("running", command="train")
try:
    with (folder.root / "large").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
except OSError as error:
    assert error.errno == errno.ENOSPC
try:
    (folder.root / "more").write_bytes(b"x" * 512)
    sys.exit("the disk is not full")
except OSError as error:
    assert error.errno == errno.ENOSPC
folder.write_state("failed", reason=sys.argv[2])
print(json.dumps(folder.read_state()))
"""


@pytest.mark.processes
def test_a_disk_that_is_really_full_has_room_for_the_cause(tmp_path: Path) -> None:
    """On a small tmpfs in a user namespace, which needs no privileges."""
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        tried = subprocess.run([*namespace, mount], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {tried.stderr.strip()}")
    command = f'{mount} && exec "$0" -c "$1" {tmp_path} "$2"'
    ran = subprocess.run(
        [*namespace, command, sys.executable, ON_A_FULL_DISK, REASON], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    state = json.loads(ran.stdout)
    assert (state["status"], state["reason"], state["command"]) == ("failed", REASON, "train")
