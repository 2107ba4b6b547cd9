"""`areal-like stop`: the right process is asked, nobody else ever is, and the end is reported as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.ledger.run_lock import lock_folder
from controller.run_folder.run_folder import RunFolder
from controller.runs import stop as module
from controller.runs.stop import stop

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[3]
CONTROLLER = """
import json, signal, sys, time
from pathlib import Path
from controller.ledger.run_lock import lock_folder
from controller.run_folder.run_folder import RunFolder

folder, manner = RunFolder(Path(sys.argv[1])), sys.argv[2]
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
lock = lock_folder(folder.root)
folder.write_state("running")
print("up", flush=True)
deadline_s = time.monotonic() + 30
while time.monotonic() < deadline_s:
    time.sleep(0.02)
    if len(signals) >= 2:
        folder.write_state("stopped", reason="SIGTERM twice: stopped at once")
        sys.exit(1)
    if signals and manner == "good":
        folder.write_state("stopped", reason="SIGTERM")
        sys.exit(0)
    if signals and manner == "failing":
        folder.write_state("failed", reason="no checkpoint: disk full")
        sys.exit(1)
"""


class Controller:
    """A process that plays the controller of a run."""

    def __init__(self, folder: RunFolder, manner: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", CONTROLLER, str(folder.root), manner],
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def play() -> Iterator[Any]:
    """play(folder, manner) runs a controller; it is gone at the end."""
    started = []

    def start(folder: RunFolder, manner: str = "good") -> Controller:
        started.append(Controller(folder, manner))
        return started[-1]

    yield start
    for controller in started:
        controller.end()


def reaped(controller: Controller) -> Any:
    """A sleep during which the test, which is the controller's parent, lets it vanish."""

    def sleep(seconds: float) -> None:
        controller.process.poll()
        time.sleep(min(seconds, 0.1))

    return sleep


def test_run_ends_normally_and_is_reported(tmp_path, play, capsys):
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder)
    assert stop(folder, sleep=reaped(controller)) == 0
    assert controller.process.wait(300.0) == 0
    said = capsys.readouterr().out
    assert "finishing the current step and saving" in said
    assert "stopped just now: SIGTERM" in said
    assert f"areal-like resume {folder.root}" in said


def test_now_sends_a_second_signal(tmp_path, play, monkeypatch):
    monkeypatch.setattr(module, "SECOND_SIGNAL_S", 0.1)
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder, "deaf")
    assert stop(folder, now=True, sleep=reaped(controller)) == 0
    assert controller.process.wait(300.0) == 1


def test_leaving_the_wait_does_not_call_the_stop_back(tmp_path, play, capsys):
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder)

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop(folder, sleep=sleep)
    assert "is still shutting down" in capsys.readouterr().err
    assert controller.process.wait(300.0) == 0


def test_run_that_fails_on_its_way_out_is_status_1(tmp_path, play, capsys):
    folder = zoo.make_run(tmp_path, "running")
    assert stop(folder, sleep=reaped(play(folder, "failing"))) == 1
    assert "disk full" in capsys.readouterr().out


def test_timeout_is_status_1_and_says_that_it_still_runs(tmp_path, play, capsys):
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder, "deaf")
    assert stop(folder, timeout_s=0.3, sleep=reaped(controller)) == 1
    assert "is still shutting down after" in capsys.readouterr().err
    assert controller.process.poll() is None


def test_controller_that_is_killed_meanwhile_is_reported_as_crashed(tmp_path, play, capsys):
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder, "deaf")

    def sleep(_: float) -> None:
        controller.process.kill()
        controller.process.wait()

    assert stop(folder, sleep=sleep) == 1
    assert "crashed" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed", "crashed"])
def test_run_that_does_not_go_on_needs_no_stop(tmp_path, capsys, kind):
    assert stop(zoo.make_run(tmp_path, kind)) == 0
    assert "nothing to stop" in capsys.readouterr().out


def test_run_of_another_machine_is_left_alone_in_words(tmp_path, capsys):
    assert stop(zoo.make_run(tmp_path, "foreign")) == 3
    assert "far-away" in capsys.readouterr().err


def test_stranger_with_the_same_process_id_is_never_signalled(tmp_path, monkeypatch):
    """Between the look and the signal the controller ends, and somebody else gets its number."""
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        folder = zoo.make_run(
            tmp_path, "running",
            controller_pid=stranger.pid, controller_started_s=psutil.Process(stranger.pid).create_time() - 500,
        )  # fmt: skip
        assert stop(folder) == 0
        looked = module.whereabouts(zoo.make_run(tmp_path, "running", controller_pid=stranger.pid,
                                                 controller_started_s=1.0))  # fmt: skip
        with module._hold(folder, looked) as send:
            assert send is None
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"")
    assert stranger.returncode == 0


def test_handle_keeps_to_the_process_that_was_looked_at(tmp_path, play):
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder)
    with module._hold(folder, module.whereabouts(folder)) as send:
        assert send is not None
        controller.end()
        send(signal.SIGTERM)


def test_run_of_another_user_is_a_mistake_in_words(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    folder = zoo.make_run(tmp_path, "running")
    lock = lock_folder(folder.root)
    with pytest.raises(UserError, match="another user"):
        stop(folder)
    os.close(lock)


def test_process_that_does_not_hold_the_runs_lock_is_not_signalled_whatever_the_state_says(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        started_s = psutil.Process(bystander.pid).create_time()
        folder = zoo.make_run(tmp_path, "running", controller_pid=bystander.pid, controller_started_s=started_s)
        for text in ("", f"{bystander.pid}\n"):
            (folder.root / "ledger.lock").write_text(text)
            with pytest.raises(UserError, match="does not have the run open"):
                stop(folder)
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"")
    assert bystander.returncode == 0


def test_without_pidfd_the_start_time_is_looked_at_before_each_signal(tmp_path, play, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    folder = zoo.make_run(tmp_path, "running")
    controller = play(folder)
    assert stop(folder, sleep=reaped(controller)) == 0


def test_what_it_waits_for_is_reported(tmp_path, play, capsys):
    folder = zoo.make_run(tmp_path, "running")
    zoo.write_status(folder, waits=["the run ends (SIGTERM): waits for the trainer to finish step 4"])
    assert stop(folder, timeout_s=0.2, sleep=reaped(play(folder, "deaf"))) == 1
    assert "waits for the trainer to finish step 4" in capsys.readouterr().out
