"""Claims about the parent of a server: no process of the family outlives the worker or the server, whenever it was
started and whatever it did to be forgotten.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import rollout
from areal_like.guard import RECORD, STDIN, SWEEP_S, guarded, remove_recorded
from rollout.engine.sglang.servers import FILES

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
from rollout.engine.server.process import ServerProcess

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


@pytest.mark.processes
def test_the_whole_family_dies_with_a_worker_killed_outright(tmp_path):
    worker, family, front = start(tmp_path)
    assert len(family) == 3
    assert front in [member.pid for member in family]
    worker.kill()
    worker.wait()
    assert survivors(family) == []


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_whole_family_dies_with_its_front_and_the_worker_learns_how_it_ended(tmp_path, number):
    worker, family, _ = start(tmp_path, kill=int(number))
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == f"the server ended with signal {number.name}"
    assert survivors(family) == []
    worker.kill()
    worker.wait()


@pytest.mark.processes
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


@pytest.mark.processes
def test_a_command_that_is_not_there_ends_with_words(tmp_path):
    command = guarded([str(tmp_path / "nothing")], until=STDIN)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ended:
        assert ended.wait(DEADLINE_S) == 127
        assert ended.stderr is not None
        assert "nothing cannot be started: No such file or directory" in ended.stderr.read()


SHARER = """
import mmap, multiprocessing, os, sys, time
lock = multiprocessing.get_context("spawn").Lock()
def share(name):
    fd = os.open("/dev/shm/" + name, os.O_CREAT | os.O_RDWR, 0o600)
    os.truncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)
kept = []
for name in sys.argv[1:]:
    share(name)
if os.fork() == 0:
    print("sem." + lock._semlock.name.removeprefix("/"), flush=True)
time.sleep(600)
"""
"""A server and its child that map files in /dev/shm, as SGLang does: a load snapshot, a semaphore, and weights."""


def shm_names(tag: str) -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if tag in path.name}


@pytest.mark.processes
@pytest.mark.parametrize("victim", ["server", "guard", "worker"])
def test_files_in_shared_memory_go_with_the_server_that_made_them_and_no_others_do(tmp_path, victim):
    tag = tmp_path.parent.name + tmp_path.name
    made = [f"sglang_loads_{tag}.shm", f"model-{tag}"]
    foreign = Path(f"/dev/shm/sglang_loads_foreign-{tag}.shm")
    foreign.write_text("another server's")
    command = guarded([sys.executable, "-c", SHARER, *made], until=STDIN, shared_memory=FILES)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as guard:
        try:
            semaphore = Path("/dev/shm", guard.stdout.readline().decode().strip())
            assert semaphore.name.startswith("sem.mp-")
            assert semaphore.exists()
            wait_until((tmp_path / RECORD).exists)
            if victim == "server":
                psutil.Process(guard.pid).children()[0].kill()
            elif victim == "guard":
                guard.kill()
            guard.stdin.close()
            guard.wait(DEADLINE_S)
            if victim == "guard":
                remove_recorded(tmp_path)
            assert not semaphore.exists()
            assert shm_names(tag) == {f"model-{tag}", foreign.name}
        finally:
            guard.kill()
            for name in shm_names(tag):
                Path("/dev/shm", name).unlink()


def test_a_recorded_name_that_is_another_file_by_now_stays(tmp_path):
    path = Path(f"/dev/shm/sem.mp-{tmp_path.parent.name}{tmp_path.name}")
    path.write_text("of another server")
    try:
        found = path.stat()
        (tmp_path / RECORD).write_text(f"{path.name} {found.st_dev} {found.st_ino + 1}\n../etc/x 1 2\nnonsense\n")
        remove_recorded(tmp_path)
        assert path.exists()
        (tmp_path / RECORD).write_text(f"{path.name} {found.st_dev} {found.st_ino}\n")
        remove_recorded(tmp_path)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def wait_until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
