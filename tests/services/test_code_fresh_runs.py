"""No run of a program leaves anything that its next run could see: nothing counts runs."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from code_harness import CodeBench, layers_here

from services.reward.judging.problem import Asserts, Streams, Task
from services.reward.sandbox.limits import Limits

pytestmark = pytest.mark.processes

CHANNELS = {
    "a file in /tmp": "import os\nn = len(os.listdir('/tmp'))\nopen(f'/tmp/{n}', 'w').close()\n",
    "a file in /dev/shm": "import os\nn = len(os.listdir('/dev/shm'))\nopen(f'/dev/shm/{n}', 'w').close()\n",
    "the current folder": "import os\nn = len(os.listdir('.'))\nopen(str(n), 'w').close()\n",
    "HOME": "import os\nh = os.path.expanduser('~')\nn = len(os.listdir(h))\nopen(f'{h}/{n}', 'w').close()\n",
    "the mode of /tmp": "import os\nn = os.stat('/tmp').st_mode & 7\nos.chmod('/tmp', 0o700 | (n + 1) & 7)\n",
    "the time of /tmp": "import os\nn = os.stat('/tmp').st_mtime < 1e6\nos.utime('/tmp', (0, 0))\n",
    "numbers of files": "import os\nopen('/tmp/x', 'w').close()\nn = os.stat('/tmp/x').st_ino\n",
    "process ids": "import os\nn = os.getpid()\n",
    "process ids since the first": "import os\nn = os.getpid() - os.getppid()\n",
    "an abstract socket": (
        "import socket, os\nn = 0\ns = socket.socket(socket.AF_UNIX)\n"
        "while True:\n    try:\n        s.bind(f'\\0run{n}'); break\n    except OSError: n += 1\n"
        "s.listen()\nif os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2)\n    import time; time.sleep(60)\n"
    ),
}
"""Each sets `n` to what it finds, and changes what the next run would find if anything were shared."""


TESTS = 3
SCRIPT = """
import json, sys
from dataclasses import replace
from services.reward.judging.judge import Judge
from services.reward.judging.problem import Task
from services.reward.sandbox.layers import find_sandbox
judge = Judge(replace(find_sandbox("namespaces"), has_fresh_runs=False))
for task in json.load(sys.stdin):
    print(json.dumps(judge.judge(Task.of(task))))
"""
LIMITS = Limits(time_s=5.0).as_dict()
Score = Callable[[str, str], tuple[bool, str]]
"""A program and what each of its TESTS runs should print -> whether all did, and the first failure."""


def by_bench(bench: CodeBench) -> Score:
    def score(program: str, expected: str) -> tuple[bool, str]:
        outcome = bench.score(program, [{"input": "", "output": expected}] * TESTS)
        return outcome.value == 1.0, outcome.reason

    return score


def judged_without_nested_namespaces(*tasks: Task) -> list[dict[str, Any]]:
    """As on a system that allows bubblewrap no namespaces within its own."""
    given = json.dumps([task.as_dict() for task in tasks])
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def without_nested_namespaces(program: str, expected: str) -> tuple[bool, str]:
    problem = Streams((("", expected),) * TESTS)
    (findings,) = judged_without_nested_namespaces(Task(program, problem, LIMITS, 60.0))
    return findings["num_passed"] == TESTS, "; ".join(findings["failures"])


def assert_no_count(score: Score, channel: str) -> None:
    """The first of several runs says what it finds; then all runs of another program must find the same."""
    body = CHANNELS[channel].strip().replace("\n", "\n    ")
    program = f"try:\n    {body}\nexcept OSError as error:\n    n = error.errno\n"
    _, why = score(program + "raise SystemExit(f'n={n}')", "")
    found = why.partition("n=")[2].partition(";")[0]
    assert found, why
    is_same, why = score(program + "print(n)\n", found)
    assert is_same, why


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_program_cannot_count_its_runs_by(namespaces: CodeBench, channel: str) -> None:
    assert_no_count(by_bench(namespaces), channel)


@pytest.mark.parametrize("channel", ["a file in /tmp", "process ids", "process ids since the first"])
def test_where_namespaces_do_not_nest_each_run_has_a_sandbox_of_its_own(namespaces: CodeBench, channel: str) -> None:
    assert_no_count(without_nested_namespaces, channel)


@pytest.mark.parametrize("channel", [name for name in CHANNELS if "process ids" not in name])
def test_without_namespaces_each_run_has_a_first_process_of_its_own(channel: str) -> None:
    if not layers_here().parts["landlock"].startswith("works"):
        pytest.skip(layers_here().parts["landlock"])
    bench = CodeBench(layer="landlock")
    try:
        assert_no_count(by_bench(bench), channel)
    finally:
        bench.close()


def test_where_namespaces_do_not_nest_tests_of_rows_have_nothing_to_write_to(namespaces: CodeBench) -> None:
    del namespaces  # this machine has the layer
    writes = (
        "def kept(path):\n    try:\n        open(path, 'w').close()\n    except OSError as error:\n"
        "        return error.errno\nassert [kept('/tmp/x'), kept('/dev/shm/x'), f()] == [30, 30, 1]"
    )
    task = Task("def f(): return 1", Asserts((writes,)), LIMITS, 60.0)
    for findings in judged_without_nested_namespaces(task, task):
        assert (findings["num_passed"], findings["failures"]) == (1, [])


def test_no_memory_semaphore_queue_or_key_outlives_a_process(bench: CodeBench) -> None:
    if bench.label.endswith("/limits"):
        pytest.skip("no filter of system calls here")
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nmade = 0o1666\n"
        "print(libc.shmget(7, 4096, made), libc.semget(7, 1, made), libc.msgget(7, made),\n"
        "      libc.mq_open(b'/x', 66, 438, 0),\n"
        "      libc.syscall({number}, b'user', b'x', b'y', 1, -3))\n"
    ).replace("{number}", {"x86_64": "248", "aarch64": "217"}[platform.machine()])
    outcome = bench.score(program, [{"input": "", "output": "-1 -1 -1 -1 -1"}])
    assert outcome.value == 1.0, outcome.reason
