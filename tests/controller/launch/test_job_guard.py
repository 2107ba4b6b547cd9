"""Claims about the process between `ray job stop` and a controller that needs longer than three seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from controller.launch.cluster.job_guard import JOB_VARIABLE, is_needed

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[3]
CODE = """
import os, signal, sys, time
from controller.launch.cluster.job_guard import guard

def work():
    asked = []

    def ask(*_):
        asked.append(1)
        open(sys.argv[1] + ".asked", "w").close()

    signal.signal(signal.SIGTERM, ask)
    open(sys.argv[1] + ".tmp", "w").write(str(os.getpid()))
    os.rename(sys.argv[1] + ".tmp", sys.argv[1])
    for _ in range(12_000):
        if len(asked) >= int(sys.argv[2]):
            open(sys.argv[1] + ".saved", "w").write(str(len(asked)))
            print("saved", flush=True)
            return 7
        time.sleep(0.05)
    return 1

sys.exit(guard(work))
"""


class Guarded:
    """The guard as a process, and the controller behind it."""

    def __init__(self, folder: Path, num_stops: int) -> None:
        self.file = folder / "pid"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(self.file), str(num_stops)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.until(self.file.exists)
        self.worker = psutil.Process(int(self.file.read_text()))

    @property
    def saved(self) -> Path:
        return self.file.with_suffix(".saved")

    @staticmethod
    def until(condition) -> None:
        deadline_s = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_worker_is_no_descendant_and_its_status_and_output_are_the_guards(tmp_path):
    guarded = Guarded(tmp_path, 0)
    out, _ = guarded.process.communicate(timeout=300)
    assert guarded.process.returncode == 7
    assert "saved" in out


def test_stop_is_passed_on_and_waited_for(tmp_path):
    guarded = Guarded(tmp_path, 1)
    assert guarded.worker.pid not in [
        child.pid for child in psutil.Process(guarded.process.pid).children(recursive=True)
    ]
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.process.wait(300.0) == 7
    assert guarded.saved.read_text() == "1"


def test_guard_killed_after_a_stop_leaves_its_worker_time_to_save(tmp_path):
    """As Ray does it: SIGTERM, and SIGKILL when that has not ended it. The death is no second stop."""
    guarded = Guarded(tmp_path, 2)
    guarded.process.send_signal(signal.SIGTERM)
    guarded.until(guarded.file.with_suffix(".asked").exists)  # the guard has passed it on
    guarded.process.kill()
    guarded.process.wait(300.0)
    time.sleep(0.5)
    assert guarded.worker.is_running()
    assert not guarded.saved.exists()
    guarded.worker.send_signal(signal.SIGTERM)
    guarded.until(guarded.saved.exists)


def test_guard_that_is_killed_without_a_word_stops_its_worker_normally(tmp_path):
    guarded = Guarded(tmp_path, 1)
    guarded.process.kill()
    guarded.until(guarded.saved.exists)
    assert guarded.saved.read_text() == "1"


@pytest.mark.parametrize(
    ("command", "is_guarded"),
    [(["train"], True), (["resume"], True), (["validate"], False), (["status"], False), ([], False)],
)
def test_only_runs_of_submitted_jobs_are_guarded(command, is_guarded, monkeypatch):
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    assert not is_needed(command)
    monkeypatch.setenv(JOB_VARIABLE, "{}")
    assert is_needed(command) == is_guarded
