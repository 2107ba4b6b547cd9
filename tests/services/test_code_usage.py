"""What is seen of a process tree from outside: processor time, memory, tasks, and what they wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from services.reward.sandbox.usage import Usage, children_of, queued_here_s, usage_below

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no scheduler statistics here"),
]
PATIENCE_S = 120.0
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(source): a Python that runs it, once it printed a line."""
    started: list[subprocess.Popen[str]] = []

    def run(source: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-S", "-c", source], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield run
    for process in started:
        for pid in (*children_of(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def until(holds: Callable[[Usage], bool], root: int) -> Usage:
    """The usage below `root`, once `holds` of it."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds(usage := usage_below(root)):
        assert time.monotonic() < give_up_s, usage
        time.sleep(0.01)
    return usage


SLEEPS = "import time\nprint('here', flush=True)\ntime.sleep(1000)\n"
SPINS_BELOW = "import os, time\nif os.fork() == 0:\n    while True: pass\nprint('here', flush=True)\ntime.sleep(1000)\n"


def test_sleeping_process_is_neither_ready_nor_blocked_and_its_active_time_stands_still(start: Start) -> None:
    root = start(SLEEPS).pid
    first = until(lambda usage: not usage.is_ready and not usage.is_blocked, root)
    time.sleep(0.05)
    assert usage_below(root).active_s == first.active_s > 0.0


def test_spinning_process_is_ready_whether_or_not_it_has_a_processor_and_idle_while_it_is_stopped(start: Start) -> None:
    root = start(SPINS_BELOW).pid
    (child,) = children_of(root)
    assert all(usage_below(root).is_ready for _ in range(20))
    until(lambda usage: usage.cpu_s >= 0.02 and usage.active_s >= 0.02, root)
    os.kill(child, signal.SIGSTOP)
    until(lambda usage: not usage.is_ready, root)


def test_processor_time_of_a_child_that_ended_stays(start: Start) -> None:
    root = start("import os, time\nif os.fork() == 0:\n    while time.process_time() < 0.1: pass\n    os._exit(0)\n"
                 "os.wait()\nprint('here', flush=True)\ntime.sleep(1000)\n").pid  # fmt: skip
    usage = usage_below(root)
    assert 0.08 <= usage.cpu_s < 10.0
    assert (usage.num_tasks, usage.memory_bytes) == (0, 0), "of the root itself nothing else counts"


def test_threads_count_and_of_our_own_processes_only_the_processor_time(start: Start) -> None:
    root = start("import os, threading, time\nif os.fork() == 0:\n"
                 "    for _ in range(3): threading.Thread(target=time.sleep, args=(1000,)).start()\n"
                 "    print('here', flush=True)\ntime.sleep(1000)\n").pid  # fmt: skip
    usage = until(lambda usage: usage.num_tasks == 4, root)
    assert usage.memory_bytes > 1 << 20
    ours = usage_below(root, ours=children_of(root))
    assert (ours.num_tasks, ours.memory_bytes) == (0, 0)
    assert ours.cpu_s >= usage.cpu_s


def test_tree_that_is_gone_uses_nothing() -> None:
    assert usage_below(1 << 30) == Usage()


def test_time_that_this_thread_stood_ready_is_known_and_never_falls() -> None:
    first = queued_here_s()
    assert 0.0 < first <= queued_here_s()
