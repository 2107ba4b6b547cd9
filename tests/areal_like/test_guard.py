"""Nothing that a command starts outlives it, not even after `kill -9`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import areal_like
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
