"""Nothing that a command starts outlives it, not even after `kill -9`."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import areal_like
from areal_like import guard
from areal_like.guard import guarded, tied

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper and parent-death signals")

PATIENCE_S = 120.0
HOME = str(Path(areal_like.__path__[0]).parent)
STARTER = """
import subprocess, sys, time
sys.path.insert(0, {home!r})
from areal_like import guard
subprocess.Popen(getattr(guard, {mode!r})([sys.executable, "-c", {command!r}]))
time.sleep(600)
"""
HANGS = """
import os, time
open("pids.new", "w").write(str(os.getpid()))
os.rename("pids.new", "pids")
time.sleep(600)
"""
HANGS_WITH_A_FAMILY = """
import os, subprocess, sys, time
runaway = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pids.new", "w").write(f"{os.getpid()} {runaway.pid}")
os.rename("pids.new", "pids")
time.sleep(600)
"""


def pids_in(folder: Path) -> list[int]:
    """Those that a process wrote, once it has."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not (folder / "pids").exists():
        assert time.monotonic() < give_up_s, "nothing was started"
        time.sleep(0.01)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def assert_gone(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "command"), [("tied", HANGS), ("guarded", HANGS), ("guarded", HANGS_WITH_A_FAMILY)])
def test_a_command_dies_with_a_starter_that_is_killed_outright(tmp_path: Path, mode: str, command: str) -> None:
    source = STARTER.format(home=HOME, mode=mode, command=command)
    starter = subprocess.Popen([sys.executable, "-c", source], cwd=tmp_path)
    pids = pids_in(tmp_path)
    starter.kill()
    starter.wait()
    assert_gone(pids)


@pytest.mark.processes
@pytest.mark.parametrize("make", [tied, guarded])
@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 6)", -6)])
def test_a_command_ends_as_it_would_by_itself(make: object, code: str, status: int) -> None:
    assert callable(make)
    assert subprocess.run(make([sys.executable, "-c", code]), check=False).returncode == status


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["tied", "guarded"])
def test_a_command_whose_starter_is_gone_is_not_run(tmp_path: Path, mode: str) -> None:
    command = (tied if mode == "tied" else guarded)([sys.executable, "-c", HANGS])
    other = str(os.getppid())
    command[command.index(str(os.getpid()))] = other  # as if another process had asked for it, and ended since
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 1
    assert not (tmp_path / "pids").exists()


@pytest.mark.processes
def test_standard_streams_are_those_of_the_command() -> None:
    code = "import sys; sys.stdout.write(sys.stdin.read()[::-1])"
    done = subprocess.run(
        guarded([sys.executable, "-c", code]), input="abc", capture_output=True, text=True, check=True
    )
    assert done.stdout == "cba"


def test_process_of_another_user_does_not_keep_the_guard_from_ending_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    families, killed = iter([[1, 2], [2], []]), []

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        killed.append(pid)

    monkeypatch.setattr(guard, "_descendants", lambda: next(families, []))
    monkeypatch.setattr(guard, "_reap", lambda: None)
    monkeypatch.setattr(guard.os, "kill", kill)
    guard._sweep()
    assert 2 in killed


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(guard, "SHM", str(folder))
    return folder


def record(folder: Path, *files: Path) -> None:
    lines = [f"{file.name} {file.lstat().st_dev} {file.lstat().st_ino}\n" for file in files]
    (folder / guard.RECORD).write_text("".join(lines))


def test_recorded_files_are_removed_where_they_are_still_the_same(tmp_path: Path, shared_memory: Path) -> None:
    same, other, unnamed = (shared_memory / name for name in ("same", "other", "unnamed"))
    link, outside = shared_memory / "link", tmp_path / "outside"
    for file in (same, other, unnamed, outside):
        file.touch()
    link.symlink_to(outside)
    record(tmp_path, same, other, link)
    replacement = shared_memory / "replacement"
    replacement.touch()
    replacement.rename(other)
    guard.remove_recorded(tmp_path)
    assert sorted(file.name for file in shared_memory.iterdir()) == ["other", "unnamed"]
    assert outside.exists(), "a link is removed and not what it leads to"
    assert not (tmp_path / guard.RECORD).exists()
    guard.remove_recorded(tmp_path)


def test_a_record_names_nothing_outside_of_shared_memory(tmp_path: Path, shared_memory: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    status = outside.stat()
    (tmp_path / guard.RECORD).write_text(f"../outside {status.st_dev} {status.st_ino}\n")
    guard.remove_recorded(tmp_path)
    assert outside.exists()


def test_only_files_that_the_family_maps_and_that_are_new_are_recorded(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: shared_memory / name for name in ("a-mapped", "a-else", "b-mapped", "a with space")}
    for file in files.values():
        file.touch()
    identities = {
        (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
        for name, found in ((name, file.stat()) for name, file in files.items())
        if name != "a-else"
    }
    monkeypatch.setattr(guard, "_descendants", lambda: [1])
    monkeypatch.setattr(guard, "_mapped", lambda pid: identities)
    kept = guard._Record(tmp_path, ("a",))
    kept.update()
    found = files["a-mapped"].stat()
    assert (tmp_path / guard.RECORD).read_text() == f"a-mapped {found.st_dev} {found.st_ino}\n"
    (tmp_path / guard.RECORD).unlink()
    kept.update()
    assert not (tmp_path / guard.RECORD).exists(), "written only where there is something new"
    old = guard._Record(tmp_path, ("a",))
    old._started_s += 3600.0
    old.update()
    assert not (tmp_path / guard.RECORD).exists(), "files of before the command are somebody else's"


def test_what_a_process_maps_is_known_by_device_and_inode(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shared_memory / "a b"
    file.write_bytes(b"x")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        found = file.stat()
        assert guard._mapped(os.getpid()) == {(os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)}
    assert guard._mapped(2**22 + 1) == set()
