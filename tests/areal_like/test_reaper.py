"""The process that removes what a killed controller has left: when it looks, and how it is started and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_like import reaper, store_owner


def test_it_looks_at_once_and_twice_more_when_its_input_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    input_, chunks = 0, [b"x", b"y", b""]
    monkeypatch.setattr(reaper.os, "read", lambda fd, size: done.append((fd, len(chunks))) or chunks.pop(0))
    monkeypatch.setattr(reaper.time, "sleep", lambda seconds: done.append(f"sleep {seconds:g}"))
    monkeypatch.setattr(store_owner, "sweep_dead", lambda: done.append("sweep"))
    reaper.main()
    waits = [line for wait_s in reaper.WAITS_S for line in (f"sleep {wait_s:g}", "sweep")]
    assert done == [(input_, 3), (input_, 2), (input_, 1), *waits]
    assert waits[:2] == ["sleep 0", "sweep"]


class Process:
    """What `subprocess.Popen` would have started."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options, self.stdin = command, options, self
        self.done: list[str] = []

    def kill(self) -> None:
        self.done.append("kill")

    def wait(self, timeout_s: float) -> None:
        self.done.append(f"wait {timeout_s:g}")

    def close(self) -> None:
        self.done.append("close")


@pytest.mark.parametrize("inherited", ["", "/somewhere"])
def test_it_is_a_bare_interpreter_in_a_session_of_its_own_with_this_installation(
    monkeypatch: pytest.MonkeyPatch, inherited: str
) -> None:
    started: list[Process] = []
    monkeypatch.setattr(reaper.subprocess, "Popen", lambda *args, **options: started.append(Process(*args, **options)))
    monkeypatch.setenv("PYTHONPATH", inherited)
    reaper.start()
    (process,) = started
    assert process.command == [sys.executable, "-P", "-m", "areal_like.reaper"]
    options = process.options
    assert (options["stdin"], options["start_new_session"]) == (subprocess.PIPE, True)
    assert options["stdout"] == options["stderr"] == subprocess.DEVNULL
    first, *rest = options["env"]["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "areal_like" / "reaper.py").is_file()
    assert rest == [inherited] * bool(inherited)


def test_a_busy_machine_that_does_not_end_it_in_time_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Process):
        def wait(self, timeout_s: float) -> None:
            super().wait(timeout_s)
            raise subprocess.TimeoutExpired(self.command, timeout_s)

    process = Slow([])
    monkeypatch.setattr(reaper.subprocess, "Popen", lambda *args, **options: process)
    reaper.start()()
    assert process.done == ["kill", f"wait {reaper.CLOSE_S:g}", "close"]


def test_a_controller_that_ends_normally_ends_it_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process([])
    monkeypatch.setattr(reaper.subprocess, "Popen", lambda *args, **options: process)
    end = reaper.start()
    assert process.done == []
    end()
    assert process.done == ["kill", f"wait {reaper.CLOSE_S:g}", "close"]
