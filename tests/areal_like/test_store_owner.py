"""Claims about folders in shared memory: only what is provably ours and dead is removed, and that within seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from areal_like import store_owner
from areal_like.process import process_identity
from areal_like.store_owner import OWNER_FILE, Owner, claim, dead_stores, sweep_dead

LIMIT_S = 300.0


def store(root: Path, name: str, **changes: object) -> Path:
    """A folder of this process, its record changed."""
    folder = root / f"areal_like-{name}-0"
    folder.mkdir()
    claim(folder)
    record = folder / OWNER_FILE
    owner = msgspec.json.decode(record.read_bytes(), type=Owner)
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, **changes)))
    (folder / "v00000001-l0.weights").write_bytes(b"x")
    return folder


def test_stores_of_dead_processes_are_swept_and_nothing_else(tmp_path: Path) -> None:
    dead = store(tmp_path, "dead", pid=2**22 - 1)
    reused_pid = store(tmp_path, "reused", identity="another boot 17")
    kept = [
        store(tmp_path, "alive"),
        store(tmp_path, "elsewhere", pid=2**22 - 1, scope="another host"),
        store(tmp_path, "other-tool", pid=2**22 - 1, made_by="something else"),
        store(tmp_path, "copy", pid=2**22 - 1, inode=1),
    ]
    experiments = tmp_path / "areal_like-my-experiments"
    experiments.mkdir()
    (experiments / "thesis.txt").write_text("precious")
    damaged = tmp_path / "areal_like-damaged-0"
    damaged.mkdir()
    (damaged / OWNER_FILE).write_text("{")
    link = tmp_path / "areal_like-link-0"
    link.symlink_to(dead)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    assert set(dead_stores(tmp_path)) == {dead, reused_pid}
    assert set(sweep_dead(tmp_path)) == {dead, reused_pid}
    assert all(path.exists() for path in [*kept, experiments / "thesis.txt", damaged])


def test_record_of_another_user_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(tmp_path, "theirs", pid=2**22 - 1)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert sweep_dead(tmp_path) == []
    assert folder.exists()


def test_folder_without_a_record_goes_only_when_empty_and_old(tmp_path: Path) -> None:
    new, old, filled = (tmp_path / f"areal_like-{name}" for name in ("new", "old", "filled"))
    for folder in (new, old, filled):
        folder.mkdir()
    (filled / "file").write_text("a user's")
    for folder in (old, filled):
        os.utime(folder, (0, 0))
    assert sweep_dead(tmp_path) == [old]
    assert filled.exists()
    assert new.exists()


@pytest.mark.processes
def test_process_has_one_identity_as_long_as_it_lives() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = process_identity(child.pid)
    assert first
    assert first == process_identity(child.pid) != process_identity(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_identity(child.pid) == "", "a zombie is dead"
    child.wait()
    assert process_identity(child.pid) == ""


@pytest.mark.processes
@pytest.mark.skipif(not store_owner.SHARED_MEMORY.is_dir(), reason="no shared memory here")
def test_weights_of_a_killed_controller_are_gone_within_seconds() -> None:
    folder = store_owner.SHARED_MEMORY / f"areal_like-test-{os.getpid()}"
    script = f"""
import time
from pathlib import Path
from areal_like import reaper
from areal_like.store_owner import claim
folder = Path({str(folder)!r})
folder.mkdir()
claim(folder)
(folder / "v00000001-l0.weights").write_bytes(b"x")
reaper.start()
print("ready", flush=True)
time.sleep(60)
"""
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "ready\n"
        assert folder.exists()
        controller.kill()
        controller.wait()
        due_s = time.monotonic() + LIMIT_S
        while folder.exists() and time.monotonic() < due_s:
            time.sleep(0.05)
        assert not folder.exists()
    finally:
        controller.kill()
        controller.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_record_that_is_a_link_proves_nothing(tmp_path: Path) -> None:
    folder = store(tmp_path, "linked", pid=2**22 - 1)
    (folder / OWNER_FILE).rename(tmp_path / "record")
    (folder / OWNER_FILE).symlink_to(tmp_path / "record")
    assert list(dead_stores(tmp_path)) == []


def test_an_empty_folder_without_a_record_is_dead_once_it_is_old(tmp_path: Path) -> None:
    folder = tmp_path / "areal_like-empty-0"
    folder.mkdir()
    now_s = time.time()
    os.utime(folder, (now_s, now_s - store_owner.NEW_S + 60.0))
    assert sweep_dead(tmp_path) == []
    os.utime(folder, (now_s, now_s - store_owner.NEW_S - 60.0))
    assert sweep_dead(tmp_path) == [folder]
    assert not folder.exists()
