"""Claims about the parent of a server: no process of the family outlives the worker or the server, whenever it was
started and whatever it did to be forgotten.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import rollout
from rollout.engine.sglang.guard import SWEEP_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper and /proc")

DEADLINE_S = 4 * SWEEP_S
HERE = str(rollout.__path__[0].removesuffix("/rollout"))
SERVER = """
import os, signal, subprocess, sys, time
runaway = "import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
runaway += "os.setsid(); os.fork() and os._exit(0); print('pid', os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", runaway]).wait()
booting = "import time; print('pid', __import__('os').getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", booting])
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""
"""A front, a child that has not asked to die with it, and a grandchild that left session and parent."""
WORKER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from rollout.engine.sglang.process import ServerProcess

async def main():
    root = Path({root!r})
    process = await ServerProcess.start([sys.executable, "-c", {server!r}], {{}}, root / "log", root)
    while (root / "log").read_text().count("pid") < 3:
        await asyncio.sleep(0.01)
    process.remember_family()
    print(process.pid, flush=True)
    if {kill!r}:
        import os
        os.kill(process.pid, {kill!r})
        while process.why_ended() is None:
            await asyncio.sleep(0.01)
        while process._process.returncode is None:
            await asyncio.sleep(0.01)
        print(process.why_ended(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start(root: Path, kill: int = 0) -> tuple[subprocess.Popen[str], list[psutil.Process], int]:
    """A worker with its server's family, and the pid of the front."""
    source = WORKER.format(here=HERE, root=str(root), server=SERVER, kill=kill)
    worker = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    front = int(worker.stdout.readline())
    family = []
    for line in (root / "log").read_text().splitlines():
        try:
            family.append(psutil.Process(int(line.split()[1])))
        except psutil.NoSuchProcess:
            assert kill
    return worker, family, front


def survivors(family: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(family, timeout=DEADLINE_S)[1]


def test_the_whole_family_dies_with_a_worker_killed_outright(tmp_path):
    worker, family, front = start(tmp_path)
    assert len(family) == 3
    assert front in [member.pid for member in family]
    worker.kill()
    worker.wait()
    assert survivors(family) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_whole_family_dies_with_its_front_and_the_worker_is_told_how_it_ended(tmp_path, number):
    worker, family, _ = start(tmp_path, kill=int(number))
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == f"the server ended with signal {number.name}"
    assert survivors(family) == []
    worker.kill()
    worker.wait()


def test_a_signal_to_the_whole_group_leaves_the_end_to_the_worker(tmp_path):
    worker, family, front = start(tmp_path)
    guard = psutil.Process(front).parent()
    assert guard is not None
    guard.send_signal(signal.SIGTERM)
    guard.send_signal(signal.SIGINT)
    assert guard.is_running()
    assert all(member.is_running() for member in family)
    worker.kill()
    worker.wait()
    assert survivors([*family, guard]) == []


def test_a_command_that_is_not_there_ends_with_words(tmp_path):
    script = Path(HERE) / "rollout" / "engine" / "sglang" / "guard.py"
    command = [sys.executable, "-I", "-S", str(script), str(tmp_path / "nothing")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ended:
        assert ended.wait(DEADLINE_S) == 127
        assert ended.stderr is not None
        assert "nothing cannot be started: No such file or directory" in ended.stderr.read()
