"""Claims about how a process starts and ends, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.process import first_cause, is_same_process, limit_threads

pytestmark = pytest.mark.processes

HOME = Path(__file__).resolve().parents[2]
WAIT_S = 300.0

CHILD = """
import asyncio, sys, threading, time
from areal_like import process
from areal_like.errors import OperationError, PolicyDiverged, UserError

async def main(spec, stop):
    print("ready", spec.name, flush=True)
    {body}

{before}
process.run_process(main, sys.argv[1:])
"""


def spec_file(tmp_path: Path, parent_pid: int | None = None) -> Path:
    spec = ProcessSpec(
        role="rollout", name="rollout-0", run_id="r", run_dir=str(tmp_path), hub_address="tcp://127.0.0.1:1",
        parent_pid=parent_pid or os.getpid(), seed=1, model=ModelSettings(), sampling=SamplingSettings(),
        staleness=StalenessSettings(), groups_per_step=1, group_size=2, num_steps=1, weight_dir=str(tmp_path),
        settings={},
    )  # fmt: skip
    spec.save(tmp_path / "spec.json")
    return tmp_path / "spec.json"


def start(tmp_path: Path, body: str, *, before: str = "", spec: Path | None = None) -> subprocess.Popen[str]:
    code = CHILD.format(body=body, before=before)
    command = [sys.executable, "-c", code, "--spec", str(spec or spec_file(tmp_path))]
    return subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> tuple[int, list[str]]:
    try:
        _, stderr = child.communicate(timeout=WAIT_S)
    finally:
        child.kill()
    return child.returncode, stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("body", "status", "last_line"),
    [
        ("pass", 0, None),
        (
            "raise UserError('no model', where='model.path', remedy='set it')",
            2,
            "error: model.path: no model -> set it",
        ),
        ("raise RuntimeError('two\\nlines')", 1, "error: RuntimeError: two lines"),
        (
            "raise ExceptionGroup('g', [PolicyDiverged(3, 'NaN')])",
            4,
            "error: the policy has diverged at version 3 (NaN) -> lower trainer.optimizer.lr or "
            "trainer.optimizer.max_grad_norm, and resume from a checkpoint before it",
        ),
        ("raise OperationError('lost the hub')", 1, "error: OperationError: lost the hub"),
        ("raise ExceptionGroup('g', [KeyError('k'), ExceptionGroup('h', [UserError('typo')])])", 2, "error: typo"),
        ("assert False", 1, "error: AssertionError"),
        ("raise asyncio.CancelledError", 1, "error: CancelledError"),
        ("sys.exit(0)", 0, None),
    ],
)
def test_exit_status_and_last_line_say_how_it_ended(
    tmp_path: Path, body: str, status: int, last_line: str | None
) -> None:
    returncode, stderr = finish(start(tmp_path, body))
    assert returncode == status
    assert (stderr[-1] if stderr else None) == last_line
    assert any(line.startswith("Traceback") or "Traceback" in line for line in stderr) == (status == 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sets_stop_and_the_end_is_orderly(tmp_path: Path, number: signal.Signals) -> None:
    child = start(tmp_path, "await asyncio.wait_for(stop.wait(), 20)")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready rollout-0\n"
    child.send_signal(number)
    assert finish(child)[0] == 0


def test_thread_that_never_ends_does_not_hold_the_process(tmp_path: Path) -> None:
    body = "asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000); raise UserError('oops')"
    returncode, stderr = finish(start(tmp_path, body, before="process.EXIT_GRACE_S = 0.2"))
    assert returncode == 2
    assert stderr[-1] == "error: oops"


def test_file_that_is_no_spec_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    returncode, stderr = finish(start(tmp_path, "pass", spec=tmp_path / "spec.json"))
    assert returncode == 2
    assert stderr[-1].startswith("error: ")


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
time.sleep(1000)
"""
ORPHAN = """
import sys, time
from areal_like import process
process.PARENT_POLL_S = 0.05
{before}
process.die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "before", ["", "sys.platform = 'other'"], ids=["by the kernel or by polling", "by polling alone"]
)
def test_child_is_gone_when_its_parent_was_killed(before: str) -> None:
    command = [sys.executable, "-c", PARENT, ORPHAN.format(before=before)]
    parent = subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, word = parent.stdout.readline().split()
    assert word == "ready"
    child = psutil.Process(int(pid))
    started_s = child.create_time()
    parent.kill()
    parent.wait(timeout=WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while is_same_process(child.pid, started_s):
        assert time.monotonic() < deadline_s, "the child outlived its parent"
        time.sleep(0.02)


def test_process_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    short = subprocess.Popen([sys.executable, "-c", "pass"])
    short.wait(timeout=WAIT_S)
    returncode, stderr = finish(start(tmp_path, "pass", spec=spec_file(tmp_path, parent_pid=short.pid)))
    assert returncode == -signal.SIGKILL
    assert "has exited, so this process exits too" in stderr[-1]


def test_first_cause_prefers_the_users_mistake() -> None:
    first = KeyError("k")
    assert first_cause(ExceptionGroup("g", [first, ValueError()])) is first


def test_thread_limit_reaches_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    limit_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "2"
