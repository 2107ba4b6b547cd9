"""A real run is looked at and stopped from other processes, as from a second terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 240.0
LONG = ["num_steps=500", "trainer.checkpoint.every_steps=100", "ledger.segment_mb=1", "warm_start=null"]
"""Far longer than anybody waits: the run is stopped. What the model can do does not matter here."""


def environment() -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(REPOSITORY), COLUMNS="100", PYTHONUNBUFFERED="1")


def start(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A command that stays, its output in a file."""
    out = tmp_path / f"out-{time.monotonic_ns()}"
    command = [sys.executable, "-P", "-m", "controller", *arguments]
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(), cwd=tmp_path)
    return process, out


@pytest.fixture
def type_in(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """type_in("status", RUN): exit status and everything printed; from a folder that is not the run's."""

    def run(*arguments: str) -> tuple[int, str]:
        process, out = start(tmp_path, *arguments)
        try:
            code = process.wait(COMMAND_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
        text = out.read_text()
        assert "Traceback" not in text
        return code, text

    return run


def test_run_is_watched_and_stopped_from_other_processes(areal, quickstart, short, type_in, tmp_path):
    run = areal("train", quickstart, *short, *LONG, "name=watched")
    run.wait_for_step(2)
    follower, followed = start(tmp_path, "logs", "watched", "--follow")
    watcher, watched = start(tmp_path, "status", "watched", "--watch")
    try:
        _look_while_it_runs(run, type_in)
        _look_at_samples(run, type_in, tmp_path)
        family = run.family()
        code, text = type_in("stop", "watched")
        assert code == 0, text
        assert "stopped" in text
        assert run.wait() == 0, run.output
        assert not run.survivors(family, timeout_s=15)
        assert follower.wait() == 0
        assert watcher.wait() == 0
    finally:
        for process in (follower, watcher):
            if process.poll() is None:
                process.kill()
                process.wait()
    logged = followed.read_text()
    for name in ("controller", "trainer", "rollout-0", "reward"):
        assert f"\n{name}" in f"\n{logged}", logged
    assert "stopped" in logged.splitlines()[-1]
    assert "stopped" in watched.read_text().splitlines()[-1]
    assert json.loads((run.folder / "state.json").read_text())["status"] == "stopped"
    _look_at_the_end(run, type_in)


def _look_while_it_runs(run: Any, type_in: Callable[..., tuple[int, str]]) -> None:
    code, text = type_in("status", "watched")
    assert code == 0
    for words in ("running", "health", "of 500", "rollout-0", "trainer", "reward", "waits"):
        assert words in text
    code, text = type_in("status", str(run.folder), "--json")
    status = json.loads(text)
    assert (code, status["kind"]) == (0, "running")
    assert status["state"]["controller_pid"] == run.process.pid
    run.wait_until(
        lambda: "rollout-0" in json.loads(type_in("status", "watched", "--json")[1])["rates"], "two readings"
    )
    code, text = type_in("ps", "--json")
    assert code == 0
    (row,) = [row for row in json.loads(text) if row["folder"] == str(run.folder)]
    assert (row["kind"], row["pid"]) == ("running", run.process.pid)
    assert row["memory_mb"] > 50
    assert "watched" in type_in("ps")[1]
    code, text = type_in("logs", "watched", "--process", "trainr")
    assert code == 2
    assert "did you mean trainer" in text


def _look_at_samples(run: Any, type_in: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, text = type_in("samples", "watched", "--step", "1", "--worst", "--limit", "3")
    assert code == 0
    assert "3 of " in text
    assert "<bos>" in text
    code, text = type_in("samples", "watched", "--best", "--limit", "5", "--format", "jsonl")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["payload"] for row in rows] == ["stored"] * 5
    assert rows[0]["reward"] >= rows[-1]["reward"]
    assert all(row["prompt"].startswith("<bos>") and row["num_tokens"] for row in rows)
    assert set(rows[0]["components"]) >= {"correct"}
    page = tmp_path / "page.html"
    assert type_in("samples", "watched", "--format", "html", "--out", str(page))[0] == 0
    assert page.read_text().count("<tr ") > 20


def _look_at_the_end(run: Any, type_in: Callable[..., tuple[int, str]]) -> None:
    code, text = type_in("stop", "watched")
    assert code == 0
    assert "nothing to stop" in text
    code, text = type_in("status", "watched", "--why")
    assert code == 0
    assert f"areal-like resume {run.folder}" in text
    assert "stopped" in type_in("ps", "--all")[1]
    assert str(run.folder) not in type_in("ps", "--json")[1]


@pytest.mark.thorough
def test_stop_now_resume_and_a_killed_controller_are_reported_as_they_are(
    areal, quickstart, short, type_in, own_forkserver
):
    run = areal("train", quickstart, *short, *LONG, "name=hurried")
    run.wait_for_step(1)
    os.kill(run.process.pid, signal.SIGSTOP)
    code, text = type_in("status", "hurried")
    os.kill(run.process.pid, signal.SIGCONT)
    assert code == 0
    assert "suspended" in text
    code, text = type_in("stop", "--now", "hurried")
    assert code == 0, text
    assert "at once" in text
    assert run.wait() in (0, 1), "0 where the step was finished before the second signal came"
    own_forkserver()
    resumed = areal("resume", str(run.folder))
    resumed.wait_until(
        lambda: type_in("status", "hurried", "--json")[0] == 0 and bool(resumed.family()[1:]), "processes"
    )
    os.kill(resumed.process.pid, signal.SIGKILL)
    resumed.process.wait()
    code, text = type_in("status", "hurried")
    assert code == 1
    assert "crashed" in text
    assert type_in("stop", "hurried")[0] == 0
