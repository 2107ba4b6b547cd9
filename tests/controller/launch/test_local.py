"""Claims about the local launcher, with real tiny processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import psutil
import pytest
from small_run import bounded, until

from areal_like.errors import OperationError
from areal_like.process import describe_status, is_alive
from controller.launch.environments import child_environment
from controller.launch.launcher import tail_of
from controller.launch.local import LocalLauncher

pytestmark = pytest.mark.processes

SLEEP = ["-c", "import time; time.sleep(60)"]
STUBBORN = [
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
]
ENVIRONMENT = dict(os.environ)


def test_output_of_a_process_is_in_its_own_log(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        code = "import sys; print('out'); print('error: words', file=sys.stderr); sys.exit(3)"
        pid = await launcher.start("one", ["-c", code], ENVIRONMENT)
        await until(lambda: not launcher.is_running("one"))
        (end,) = launcher.reap()
        assert (end.name, end.pid, end.returncode, end.expected) == ("one", pid, 3, False)
        assert launcher.reap() == []
        assert launcher.names == []
        assert set(tail_of(launcher.log_of("one")).splitlines()) == {"out", "error: words"}

    bounded(test())


def test_exit_of_a_process_that_was_asked_to_end_is_expected(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        for name, tell in (("a", launcher.terminate), ("b", launcher.kill)):
            await launcher.start(name, SLEEP, ENVIRONMENT)
            tell(name)
            await until(lambda name=name: not launcher.is_running(name))
        assert [end.expected for end in launcher.reap()] == [True, True]

    bounded(test())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "lo", "::1"])
def test_services_listen_on_loopback_unless_the_host_is_an_address_that_others_reach(tmp_path, host):
    address = asyncio.run(LocalLauncher(tmp_path, host).address_for("reward"))
    assert address.startswith("tcp://127.0.0.1:")


def test_process_deaf_to_sigterm_is_killed_after_the_grace(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        await launcher.start("deaf", STUBBORN, ENVIRONMENT)
        await launcher.start("meek", SLEEP, ENVIRONMENT)
        pids = [launcher.pid_of("deaf"), launcher.pid_of("meek")]
        await until(lambda: "deaf" in tail_of(launcher.log_of("deaf")))
        assert await launcher.stop_all(0.3) == ["deaf"]
        assert launcher.names == []
        assert not any(psutil.pid_exists(pid) for pid in pids if pid)

    bounded(test())


def test_hurry_ends_the_grace(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        await launcher.start("deaf", STUBBORN, ENVIRONMENT)
        await until(lambda: "deaf" in tail_of(launcher.log_of("deaf")))
        began_s = time.monotonic()
        assert await launcher.stop_all(60.0, lambda: time.monotonic() - began_s > 0.2) == ["deaf"]

    bounded(test())


def test_what_a_dead_process_had_started_goes_with_it(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        code = (
            "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
            "print(p.pid, flush=True)"
        )
        await launcher.start("parent", ["-c", code], ENVIRONMENT)
        await until(lambda: not launcher.is_running("parent"))
        orphan = psutil.Process(int(tail_of(launcher.log_of("parent"))))
        assert orphan.is_running()
        launcher.reap()
        await until(lambda: not is_alive(orphan))

    bounded(test())


def test_ctrl_c_in_the_terminal_does_not_reach_children(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        pid = await launcher.start("one", SLEEP, ENVIRONMENT)
        assert os.getpgid(pid) != os.getpgid(0)
        await launcher.stop_all(5.0)

    bounded(test())


def test_process_that_cannot_be_started_is_an_error_in_words(tmp_path, monkeypatch):
    async def test():
        with pytest.raises(OperationError, match="cannot start one"):
            await LocalLauncher(tmp_path / "missing").start("one", SLEEP, ENVIRONMENT)
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(OperationError, match="cannot start one"):
            await LocalLauncher(tmp_path).start("one", SLEEP, ENVIRONMENT)

    bounded(test())


def test_users_module_does_not_become_ours_but_can_be_imported(tmp_path):
    (tmp_path / "trainer.py").write_text("raise SystemExit('shadow')")
    (tmp_path / "random.py").write_text("raise SystemExit('shadow of an installed one')")
    (tmp_path / "my_reward.py").write_text("WORD = 'mine'")

    async def test():
        launcher = LocalLauncher(tmp_path)
        code = "from areal_like.import_check import append_user_path; append_user_path()\n"
        code += "import trainer.config, random, my_reward, os; print(my_reward.WORD, os.environ['OMP_NUM_THREADS'])"
        await launcher.start("one", ["-c", code], child_environment(3, user_path=tmp_path))
        await until(lambda: not launcher.is_running("one"))
        assert tail_of(launcher.log_of("one")) == "mine 3"

    bounded(test())


def test_tail_is_the_end_of_a_long_log_and_empty_without_one(tmp_path):
    path = tmp_path / "x.log"
    assert tail_of(path) == ""
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(50_000)) + b"\xff\n")
    assert tail_of(path, num_lines=2).splitlines() == ["line 49999", "\N{REPLACEMENT CHARACTER}"]


def test_status_is_reported_in_words():
    assert describe_status(3) == "status 3"
    assert describe_status(-9) == "signal SIGKILL"
    assert describe_status(-99) == "signal 99"


def test_cancelled_start_leaves_no_process(tmp_path):
    async def test():
        launcher = LocalLauncher(tmp_path)
        before = {child.pid for child in psutil.Process().children()}
        starting = asyncio.create_task(launcher.start("one", SLEEP, ENVIRONMENT))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await launcher.stop_all(5.0)
        alive = [child for child in psutil.Process().children() if child.pid not in before and is_alive(child)]
        assert alive == []

    bounded(test())
