"""Verdicts against an oracle without a sandbox, and published references against their own tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_harness import CodeBench
from example_counts import num_examples

from benchmarks.program_mutants import bare_verdict, mutants_of

pytestmark = pytest.mark.processes

TASKS = [
    (
        "def f(xs):\n    best = xs[0]\n    for x in xs:\n        if x > best:\n            best = x\n    return best\n",
        ["assert f([3, 9, 2]) == 9", "assert f([-5, -7]) == -5", "assert f([1]) == 1"],
    ),
    (
        "def f(s):\n    counts = {}\n    for c in s:\n        counts[c] = counts.get(c, 0) + 1\n    return counts\n",
        ["assert f('abca') == {'a': 2, 'b': 1, 'c': 1}", "assert f('') == {}"],
    ),
    (
        "def f(n):\n    if n < 2:\n        return False\n    for d in range(2, int(n ** 0.5) + 1):\n"
        "        if n % d == 0:\n            return False\n    return True\n",
        ["assert [n for n in range(20) if f(n)] == [2, 3, 5, 7, 11, 13, 17, 19]", "assert f(25) is False"],
    ),
    (
        "def f(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
        ["assert f(12, 18) == 6", "assert f(7, 5) == 1", "assert f(0, 4) == 4"],
    ),
    (
        "class Queue:\n    def __init__(self):\n        self.items = []\n"
        "    def put(self, x):\n        self.items.append(x)\n"
        "    def get(self):\n        if not self.items:\n            raise KeyError('empty')\n"
        "        return self.items.pop(0)\n",
        [
            "q = Queue()\nq.put(1)\nq.put(2)\nassert q.get() == 1 and q.get() == 2",
            "try:\n    q.get()\n    assert False, 'no error'\nexcept KeyError as e:\n    assert 'empty' in str(e)",
        ],
    ),
    (
        "def f(n):\n    a, b = 0, 1\n    while a < n:\n        yield a\n        a, b = b, a + b\n",
        ["assert list(f(30)) == [0, 1, 1, 2, 3, 5, 8, 13, 21]", "assert sum(f(10)) == 20", "assert next(f(5)) == 0"],
    ),
    (
        "def f(xs):\n    for i in range(len(xs)):\n        for j in range(len(xs) - 1 - i):\n"
        "            if xs[j] > xs[j + 1]:\n                xs[j], xs[j + 1] = xs[j + 1], xs[j]\n",
        ["a = [4, 1, 3]\nf(a)\nassert a == [1, 3, 4]", "b = []\nf(b)\nassert b == []"],
    ),
    (
        "def f(x, y):\n    return (x * 2.5 + y, str(x) + 'é', {x, y}, [None, True][x > y])\n",
        ["assert f(2, 1) == (6.0, '2é', {1, 2}, True)", "assert f(1, 1)[3] is None"],
    ),
]
NUM_MUTANTS, SEED = 8, 7
TIME_LIMIT_S, ORACLE_TIMEOUT_S = 0.4, 1.0
"""For programs of microseconds; among their mutants are some that never end."""


def disagreements(
    bench: CodeBench,
    tasks: list[tuple[dict[str, Any], str, str]],
    num_mutants: int,
    folder: Path,
    time_limit_s: float,
    timeout_s: float,
) -> tuple[list[str], int, int]:
    """Mutants judged otherwise than by the oracle; how many there were, and how many of them pass."""
    found, num_judged, num_right = [], 0, 0
    for row, program, tests in tasks:
        for mutant in mutants_of(program, num_mutants, SEED):
            outcome = bench.answer(row | {"time_limit_s": time_limit_s}, mutant)
            is_right = bare_verdict(mutant, tests, folder, timeout_s)
            num_judged += 1
            num_right += is_right
            if outcome.value != float(is_right):
                found.append(f"{outcome.kind} {outcome.value} {outcome.reason}, oracle {is_right}:\n{mutant}\n{tests}")
    return found, num_judged, num_right


@pytest.mark.thorough
def test_verdicts_on_mutants_are_those_of_a_bare_python(bench: CodeBench, tmp_path: Path) -> None:
    tasks = [({"tests": tests}, program, "\n".join(tests)) for program, tests in TASKS]
    found, num_judged, num_right = disagreements(bench, tasks, NUM_MUTANTS, tmp_path, TIME_LIMIT_S, ORACLE_TIMEOUT_S)
    assert found == []
    assert num_judged >= 55
    assert 0 < num_right < num_judged / 2, "the oracle itself tells them apart"


@pytest.mark.parametrize(("program", "tests"), TASKS)
def test_every_reference_passes(bench: CodeBench, program: str, tests: list[str]) -> None:
    assert bench.score(program, tests).value == 1.0


def some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them, or a quarter where property tests have a quarter of their examples."""
    return rows[:: len(rows) // num_examples(len(rows))]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.thorough
@pytest.mark.e2e
def test_published_references_pass_their_own_tests(bench: CodeBench, published: Callable[[str], Path]) -> None:
    failed = []
    for row in rows_of(published("code/humaneval.jsonl")):
        outcome = bench.answer(row, row["canonical_solution"])
        failed += [] if outcome.value == 1.0 and not outcome.reason else [(row["task_id"], outcome.reason)]
    for row in rows_of(published("code/mbpp_nontest.jsonl"))[::6]:  # benchmarks.reward_rates takes all
        given = row | {"test_list": row["test_list"] + row["challenge_test_list"]}
        outcome = bench.answer(given, f"```python\n{row['code']}\n```")
        failed += [] if outcome.value == 1.0 and not outcome.reason else [(row["task_id"], outcome.reason)]
        if row["sanitized"]:
            outcome = bench.answer(row["sanitized"] | {"code": ""}, row["sanitized"]["code"])
            failed += [] if outcome.value == 1.0 else [(row["task_id"], outcome.reason)]
    assert failed == []


@pytest.mark.e2e
def test_verdicts_on_mutants_of_published_references_are_those_of_a_bare_python(
    bench: CodeBench, published: Callable[[str], Path], tmp_path: Path
) -> None:
    tasks = []
    for row in some(rows_of(published("code/humaneval.jsonl"))[::6]):
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        tasks.append((row, row["prompt"] + row["canonical_solution"], tests))
    for row in some(rows_of(published("code/mbpp_nontest.jsonl"))[::18]):
        tasks.append((row, row["code"], "\n".join([row["test_setup_code"], *row["test_list"]])))
    found, num_judged, num_right = disagreements(bench, tasks, 1, tmp_path, 2.0, 6.0)
    assert found == []
    assert num_judged >= num_examples(50)
    assert 0 < num_right < num_judged / 2
