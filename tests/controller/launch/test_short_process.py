"""How a process of one module ends, in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_like.errors import OperationError, UserError
from controller.launch import short_process
from controller.launch.short_process import run_module


class Ended:
    def __init__(self, returncode: int, stderr: str) -> None:
        self.returncode, self.stderr = returncode, stderr


@pytest.mark.parametrize(
    ("status", "stderr", "error", "words"),
    [
        (2, "noise\nerror: no such scorer\n", UserError, "no such scorer"),
        (2, "", UserError, "a.module rejected its input"),
        (1, f"{'x' * 9}{'y' * 1999}z\n", OperationError, f"the process a.module exited with status 1: {'y' * 1999}z"),
        (-9, "", OperationError, "the process a.module exited with status -9: "),
    ],
)
def test_end_of_a_process_is_named(
    status: int, stderr: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_process, "run_guarded", lambda *_, **__: Ended(status, stderr))
    with pytest.raises(error) as raised:
        run_module(["a.module", "in"], 3.0)
    assert str(raised.value) == words


def test_process_that_does_not_end_is_named_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout_s: float, env: dict[str, str]) -> None:
        assert command == [sys.executable, "-P", "-m", "a.module", "in"]
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(short_process, "run_guarded", hang)
    with pytest.raises(OperationError, match=r"^the process a\.module did not exit within 2\.5 s$"):
        run_module(["a.module", "in"], 2.5)


def test_process_that_ends_well_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_process, "run_guarded", lambda *_, **__: Ended(0, "a warning"))
    run_module(["a.module"], 1.0)
