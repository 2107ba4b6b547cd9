"""How benchmarks run whole jobs: to their end, until it is enough, and never longer than they may."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import runs

FINISHES_ITS_STEP = """
import signal, sys, time
received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
sys.exit(7 if len(received) == 1 else 1)
"""


@pytest.mark.processes
def test_a_run_that_has_shown_enough_is_interrupted_once(monkeypatch):
    monkeypatch.setattr(runs, "LOOK_S", 0.01)
    process = subprocess.Popen([sys.executable, "-c", FINISHES_ITS_STEP], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    looks = iter([False, False, True])
    runs._stop_when(process, lambda: next(looks), None)
    assert process.returncode == 7
    process.stdout.close()


@pytest.mark.processes
def test_a_run_that_never_shows_enough_has_a_deadline(monkeypatch):
    monkeypatch.setattr(runs, "LOOK_S", 0.01)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(subprocess.TimeoutExpired):
        runs._stop_when(process, lambda: False, 0.05)
    process.kill()
    process.wait()


@pytest.mark.processes
def test_a_job_that_cannot_start_ends_the_benchmark_with_its_words(tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)ended with 2:.*actor_lr"):
        runs.train("configs/quickstart.yaml", ["actor_lr=1"], tmp_path)


def test_the_reason_of_a_failed_job_is_its_error_not_what_followed():
    assert runs.JobFailed("train\nended with 1:\nerror: trainer: out of memory\nits log: trainer.log").reason == (
        "trainer: out of memory"
    )
    assert runs.JobFailed("train\nended with -9:\nstep 3").reason == "step 3"
