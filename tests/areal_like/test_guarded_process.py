"""A guarded command that is ended early leaves nothing behind, also not what it started in sessions of its own."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import areal_like
from areal_like import guarded_process
from areal_like.guard import END, guarded
from areal_like.guarded_process import end_guarded, run_guarded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper and parent-death signals")

PATIENCE_S = 120.0
HOME = Path(areal_like.__path__[0]).parent
HANGS_WITH_A_FAMILY = """
import os, subprocess, sys, time
runaway = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pids.new", "w").write(f"{os.getpid()} {runaway.pid}")
os.rename("pids.new", "pids")
time.sleep(600)
"""
PACKAGES = ("areal_like", "controller", "rollout", "services", "trainer")


def pids_in(folder: Path) -> list[int]:
    """Those that the command wrote, once it has."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not (folder / "pids").exists():
        assert time.monotonic() < give_up_s, "nothing was started"
        time.sleep(0.01)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def assert_gone(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []


@pytest.mark.processes
def test_end_guarded_ends_what_runs_in_a_session_of_its_own(tmp_path: Path) -> None:
    process = subprocess.Popen(guarded([sys.executable, "-c", HANGS_WITH_A_FAMILY]), cwd=tmp_path)
    pids = pids_in(tmp_path)
    end_guarded(process)
    assert process.returncode == -9, "a command that was ended is no success"
    assert_gone(pids)
    end_guarded(process)  # safe to call again


@pytest.mark.processes
def test_run_past_its_time_limit_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def communicate(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
        pids.extend(pids_in(tmp_path))  # the limit ends once there is a family
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(subprocess.TimeoutExpired):
        run_guarded([sys.executable, "-c", HANGS_WITH_A_FAMILY], timeout_s=60.0)
    assert_gone(pids)


@pytest.mark.processes
def test_run_returns_status_and_text() -> None:
    code = "import sys; print(sys.stdin.read() + 'out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_guarded([sys.executable, "-c", code], timeout_s=60.0)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


class Child:
    """A process of asyncio's that ends when it is killed, or at once by the signal."""

    def __init__(self, *, returncode: int | None = None, is_stuck: bool = False) -> None:
        self.returncode, self.calls, self.is_stuck = returncode, list[object](), is_stuck

    def send_signal(self, number: int) -> None:
        self.calls.append(number)

    def kill(self) -> None:
        self.calls.append("kill")
        self.is_stuck = False

    async def wait(self) -> None:
        self.calls.append("wait")
        if self.is_stuck:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("facts", "calls"),
    [
        ({}, [END, "wait"]),
        ({"returncode": 0}, []),
        ({"is_stuck": True}, [END, "wait", "kill", "wait"]),
    ],
)
def test_child_of_a_loop_is_ended_by_its_guard_and_killed_where_that_takes_too_long(
    facts: dict[str, Any], calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_process, "SWEEP_S", 0.0)
    monkeypatch.setattr(guarded_process, "MARGIN_S", 0.01)
    child = Child(**facts)
    asyncio.run(guarded_process.end_guarded_child(child))  # type: ignore[arg-type]
    assert child.calls == calls


def calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node


def test_no_guarded_command_is_run_by_subprocess_run_which_kills_the_guard_at_its_time_limit() -> None:
    for package in PACKAGES:
        for path in (HOME / package).rglob("*.py"):
            source = path.read_text()
            if "guarded(" not in source or "subprocess" not in source:  # parsing all files takes seconds
                continue
            for call in calls_of(ast.parse(source), "subprocess.run"):
                assert "guarded(" not in ast.unparse(call.args[0]), f"{path}:{call.lineno}: use run_guarded"
