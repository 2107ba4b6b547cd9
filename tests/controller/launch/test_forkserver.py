"""Claims about processes forked from one that has imported what they need, with real tiny processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from small_run import DEADLINE_S, bounded, until

from areal_like.process import command_words
from controller.config.run_config import RunConfig
from controller.launch import forked
from controller.launch.environments import child_environment
from controller.launch.forked import SHARED
from controller.launch.launcher import tail_of
from controller.launch.local import LocalLauncher, is_forking
from controller.wiring.preload import PRELOAD
from controller.wiring.process_specs import FORKED
from services.processes.process_tree import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server is used on Linux only")

CHILD = """
import json, os, sys, tempfile, time
import numpy, preloaded
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "imported_by": preloaded.PID, "parent": os.getppid(), "session": os.getsid(0),
        "threads": os.environ["OMP_NUM_THREADS"], "mine": os.environ["MINE"], "stdin": sys.stdin.read(),
        "safe_path": sys.flags.safe_path, "folder": os.getcwd(), "draw": int(numpy.random.randint(1 << 60)),
        "temporary": tempfile.gettempdir(),
    }), flush=True)
    print("error: words", file=sys.stderr)
    if sys.argv[1] == "wait":
        time.sleep(60)
    sys.exit(3)
"""


@contextlib.asynccontextmanager
async def forking(folder: Path, monkeypatch, preload: tuple[str, ...] = ("numpy", "preloaded")):
    (folder / "preloaded.py").write_text("import os, tempfile\nPID = os.getpid()\ntempfile.gettempdir()\n")
    (folder / "forked_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv(SHARED, raising=False)
    launcher = LocalLauncher(folder, preload=preload, forked=("forked_child",))
    await launcher.open(print)
    try:
        yield launcher
    finally:
        await launcher.stop_all(0.0)
        await launcher.close()


async def start(launcher: LocalLauncher, name: str, word: str) -> int:
    temporary = str(launcher.log_of(name).parent)
    environment = {**child_environment(2, user_path=launcher.user_path), "MINE": name, "TMPDIR": temporary}
    return await launcher.start(name, ["-m", "forked_child", word], environment)


def words_of(launcher: LocalLauncher, name: str) -> dict:
    return json.loads(tail_of(launcher.log_of(name)).splitlines()[0])


@pytest.mark.processes
def test_a_forked_process_is_what_a_started_one_would_be_but_imports_nothing_again(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            pids = {name: await start(launcher, name, "go") for name in ("one", "two")}
            await until(lambda: not any(launcher.is_running(name) for name in pids))
            ends = {end.name: (end.pid, end.returncode, end.expected) for end in launcher.reap()}
            assert ends == {name: (pid, 3, False) for name, pid in pids.items()}
            for name, pid in pids.items():
                words = words_of(launcher, name)
                assert words["imported_by"] == words["parent"] != pid
                assert words["argv"][1:] == ["go"]
                assert words["session"] == pid
                assert (words["threads"], words["mine"], words["stdin"]) == ("2", name, "")
                assert words["safe_path"]
                assert words["temporary"] == str(launcher.log_of(name).parent)
                assert "error: words" in tail_of(launcher.log_of(name))
            assert words_of(launcher, "one")["draw"] != words_of(launcher, "two")["draw"]

    bounded(test())


@pytest.mark.processes
def test_a_forked_process_is_known_by_its_name_and_heeds_signals(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            for name, tell, status in (
                ("a", launcher.terminate, -signal.SIGTERM),
                ("b", launcher.kill, -signal.SIGKILL),
            ):
                pid = await start(launcher, name, "wait")
                await until(lambda name=name: "error: words" in tail_of(launcher.log_of(name)))
                assert command_words(psutil.Process(pid))[-3:] == ["-m", "forked_child", "wait"]
                assert launcher.cpu_s_of(name) is not None
                tell(name)
                await until(lambda name=name: not launcher.is_running(name))
                (end,) = launcher.reap()
                assert (end.returncode, end.expected) == (status, True)

    bounded(test())


@pytest.mark.processes
def test_children_end_with_the_fork_server_and_later_ones_do_without_it(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            pid = await start(launcher, "one", "wait")
            await until(lambda: "error: words" in tail_of(launcher.log_of("one")))
            server = words_of(launcher, "one")["parent"]
            os.kill(server, signal.SIGKILL)
            await until(lambda: not launcher.is_running("one") and not is_alive(pid))
            assert [(end.returncode, end.expected) for end in launcher.reap()] == [(-signal.SIGKILL, False)]
            again = await start(launcher, "two", "go")
            await until(lambda: not launcher.is_running("two"))
            assert words_of(launcher, "two")["imported_by"] == again

    bounded(test())


def stopped_server(launcher: LocalLauncher, name: str) -> int:
    """The fork server of a running child, suspended."""
    server = words_of(launcher, name)["parent"]
    os.kill(server, signal.SIGSTOP)
    return server


@pytest.mark.processes
def test_child_of_a_stopped_server_is_seen_to_end_and_started_again_without_it(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            said: list[str] = []
            launcher._forker._say = said.append
            pids = {name: await start(launcher, name, "wait") for name in ("one", "other")}
            await until(lambda: all("error: words" in tail_of(launcher.log_of(name)) for name in pids))
            server = stopped_server(launcher, "one")
            os.kill(pids["one"], signal.SIGKILL)
            await until(lambda: not launcher.is_running("one"))
            assert [(end.name, end.returncode) for end in launcher.reap()] == [("one", -signal.SIGKILL)]
            assert launcher.is_running("other")
            again = await start(launcher, "one", "go")
            await until(lambda: not launcher.is_running("one"))
            assert json.loads(tail_of(launcher.log_of("one")).splitlines()[-2])["imported_by"] == again
            (cause,) = said
            assert f"fork server (process {server})" in cause
            assert "stopped (SIGSTOP)" in cause

    bounded(test())


@pytest.mark.processes
def test_exit_status_of_a_child_is_known_although_the_server_is_stopped(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            pid = await start(launcher, "one", "wait")
            await until(lambda: "error: words" in tail_of(launcher.log_of("one")))
            stopped_server(launcher, "one")
            os.kill(pid, signal.SIGTERM)
            await until(lambda: not launcher.is_running("one"))
            assert [end.returncode for end in launcher.reap()] == [-signal.SIGTERM]

    bounded(test())


@pytest.mark.processes
def test_request_to_a_stopped_server_is_given_up_and_what_it_forks_later_is_killed(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            await start(launcher, "one", "wait")
            await until(lambda: "error: words" in tail_of(launcher.log_of("one")))
            server = stopped_server(launcher, "one")
            pid = await start(launcher, "two", "wait")
            await until(lambda: "error: words" in tail_of(launcher.log_of("two")))
            assert words_of(launcher, "two")["imported_by"] == pid
            os.kill(server, signal.SIGCONT)
            await until(lambda: launcher._forker._num_abandoned == 0)
            children = psutil.Process(server).children()
            await until(lambda: [child.pid for child in children if is_alive(child.pid)] == [launcher.pid_of("one")])
            assert launcher.is_running("two")
            await start(launcher, "three", "go")
            await until(lambda: not launcher.is_running("three"))
            assert words_of(launcher, "three")["imported_by"] == server, "it is used again"

    bounded(test())


class Pipe:
    """Takes the requests to a fork server that this test plays itself."""

    def __init__(self) -> None:
        self.num_requests = 0

    def write(self, line: bytes) -> None:
        self.num_requests += 1


@contextlib.contextmanager
def sleepers(number: int):
    """Processes as a fork server would have made."""
    made = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(number)]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()


def played_forker(folder: Path, said: list[str]) -> tuple[forked.Forker, Pipe]:
    forker = forked.Forker(folder / "log", (), said.append)
    pipe = forker._writer = Pipe()
    forker._ready.set()
    return forker, pipe


@pytest.mark.processes
def test_end_of_what_was_forked_for_an_abandoned_request_does_not_discredit_the_server(tmp_path, monkeypatch):
    async def test():
        said: list[str] = []
        forker, pipe = played_forker(tmp_path, said)
        with sleepers(1) as (child,):
            request = asyncio.create_task(forker.fork("m", (), {}, tmp_path / "one"))
            await until(lambda: pipe.num_requests == 1)
            request.cancel()
            await asyncio.wait([request])
            forker._hear({"pid": child.pid})
            assert child.wait(DEADLINE_S) == -signal.SIGKILL
            forker._hear({"ended": child.pid, "status": -signal.SIGKILL})
            await asyncio.sleep(10 * forked.REPORT_S)
            assert said == []

    monkeypatch.setattr(forked, "REPORT_S", 0.05)
    bounded(test())


@pytest.mark.processes
def test_answer_in_the_moment_a_request_is_abandoned_is_not_taken_for_the_next_ones(tmp_path):
    async def test():
        forker, pipe = played_forker(tmp_path, [])
        with sleepers(2) as (first, second):
            request = asyncio.create_task(forker.fork("m", (), {}, tmp_path / "one"))
            await until(lambda: pipe.num_requests == 1)
            forker._hear({"pid": first.pid})
            request.cancel()
            await asyncio.wait([request])
            request = asyncio.create_task(forker.fork("m", (), {}, tmp_path / "two"))
            await until(lambda: pipe.num_requests == 2)
            forker._hear({"pid": second.pid})
            assert (await request).pid == second.pid
            assert first.wait(DEADLINE_S) == -signal.SIGKILL
            assert second.poll() is None

    bounded(test())


@pytest.mark.processes
def test_stopped_server_does_not_hold_up_the_end(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as launcher:
            pids = [await start(launcher, name, "wait") for name in ("one", "two")]
            await until(lambda: all("error: words" in tail_of(launcher.log_of(name)) for name in ("one", "two")))
            server = stopped_server(launcher, "one")
            assert await launcher.stop_all(DEADLINE_S) == [], "none had to be killed after its grace"
            await launcher.close()
            assert not any(is_alive(pid) for pid in [*pids, server])

    bounded(test())


@pytest.mark.processes
def test_where_the_imports_fail_every_process_imports_for_itself(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch, preload=("preloaded", "no_such_module")) as launcher:
            pid = await start(launcher, "one", "go")
            await until(lambda: not launcher.is_running("one"))
            assert words_of(launcher, "one")["imported_by"] == pid
            assert "no_such_module" in tail_of(launcher.log_of("forkserver"))

    bounded(test())


@pytest.mark.processes
def test_nothing_of_it_outlives_a_killed_starter(tmp_path, monkeypatch):
    script = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from controller.launch.environments import child_environment
from controller.launch.local import LocalLauncher
async def main():
    launcher = LocalLauncher(Path({str(tmp_path)!r}), preload=("numpy", "preloaded"), forked=("forked_child",))
    await launcher.open(print)
    environment = {{**child_environment(1, user_path=Path.cwd()), "MINE": "one"}}
    print(await launcher.start("one", ["-m", "forked_child", "wait"], environment), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def test():
        async with forking(tmp_path, monkeypatch):
            starter = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", script, stdout=asyncio.subprocess.PIPE
            )
            try:
                pid = int(await starter.stdout.readline())
                server = psutil.Process(pid).ppid()
                assert server != starter.pid
            finally:
                starter.kill()
                await starter.communicate()
            await until(lambda: not is_alive(pid) and not is_alive(server))

    bounded(test())


@pytest.mark.processes
def test_runs_may_share_a_server_and_each_ends_alone(tmp_path, monkeypatch):
    async def test():
        async with forking(tmp_path, monkeypatch) as alone:
            path = tmp_path / "socket"
            launchers = [LocalLauncher(folder_of(tmp_path, at), forked=("forked_child",)) for at in range(2)]
            server = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "areal_like.forkserver", "--starter", str(os.getpid()),
                "--listen", str(path), "numpy", "preloaded", env=child_environment(1, user_path=tmp_path), cwd=tmp_path,
            )  # fmt: skip
            try:
                await until(path.exists)
                monkeypatch.setenv(SHARED, str(path))
                for at, launcher in enumerate(launchers):
                    await launcher.open(print)
                    await start(launcher, f"run-{at}", "wait")
                    name = f"run-{at}"
                    await until(lambda launcher=launcher, name=name: "error" in tail_of(launcher.log_of(name)))
                    words = words_of(launcher, name)
                    assert (words["imported_by"], words["folder"]) == (server.pid, os.getcwd())
                pids = [launcher.pid_of(f"run-{at}") for at, launcher in enumerate(launchers)]
                await launchers[0].close()
                await until(lambda: not is_alive(pids[0]))
                assert launchers[1].is_running("run-1")
                server.kill()
                await until(lambda: not is_alive(pids[1]) and not launchers[1].is_running("run-1"))
                await launchers[1].close()
            finally:
                if server.returncode is None:
                    server.kill()
                await server.wait()
                for launcher in launchers:
                    await launcher.stop_all(0.0)
            assert alone.names == []

    bounded(test())


def folder_of(tmp_path: Path, at: int) -> Path:
    folder = tmp_path / f"logs-{at}"
    folder.mkdir()
    return folder


@pytest.mark.processes
def test_what_is_preloaded_starts_no_thread_and_touches_no_device():
    code = (
        f"import importlib, os\nfor name in {PRELOAD!r}: importlib.import_module(name)\n"
        "import torch; print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())"
    )
    environment = child_environment(1, user_path=Path.cwd())
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["1", "False"], done.stderr


@pytest.mark.parametrize(
    ("method", "device", "expected"),
    [("auto", "cpu", True), ("auto", "cuda", False), ("spawn", "cpu", False), ("forkserver", "cuda", True)],
)
def test_auto_forks_where_all_devices_are_cpus(method, device, expected):
    data = {"train": {"generator": "running_sum"}}
    config = RunConfig.model_validate({"data": data, "launch": {"start_method": method}, "trainer": {"device": device}})
    assert is_forking(config) is expected


def test_every_forked_module_is_one_that_is_started():
    assert {"rollout", "trainer", "services.reward", "trainer.prepare"} == FORKED
