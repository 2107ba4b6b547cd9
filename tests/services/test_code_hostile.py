"""No hostile program gets a point it did not earn, keeps one it did, leaves anything behind, or harms the next one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from code_harness import CodeBench
from hostile_programs import ADD, ADD_TESTS, PROGRAMS, SUM, SUM_TESTS

pytestmark = pytest.mark.processes

LIMITS = {"time_limit_s": 0.4, "memory_limit_mb": 256}
TRACES = (
    "/tmp/a",
    "/tmp/f0",
    "/tmp/l0",
    "/dev/shm/a",
    "/dev/shm/f0",
    "/tmp/result.json",
    "/dev/shm/verdict",
    "/x",
    "/y",
)
TRACES_HERE = ("verdict.json", "result.txt", "passed", "d")


@pytest.fixture(autouse=True)
def _confined(bench: CodeBench) -> None:
    """Resource limits alone would let these programs attack the user who runs the tests."""
    if bench.label.endswith("/limits"):
        pytest.skip("no sandbox here worth the name")


def assert_clean(bench: CodeBench) -> None:
    assert bench.processes_left() == []
    assert [path for path in TRACES if os.path.lexists(path)] == []
    assert [name for name in TRACES_HERE if Path(name).exists()] == []


@pytest.mark.parametrize("name", PROGRAMS["fails"])
def test_no_point_for(bench: CodeBench, name: str) -> None:
    if bench.label.endswith("/seccomp") and "reads" in name:
        pytest.skip("this layer does not hide files, and says so")
    outcome = bench.score(PROGRAMS["fails"][name], ADD_TESTS, **LIMITS)
    assert (outcome.kind, outcome.value) == ("scored", 0.0), outcome.reason
    assert outcome.reason.startswith("code: ")
    assert outcome.reason.isprintable()
    assert_clean(bench)


@pytest.mark.parametrize("name", PROGRAMS["stream fails"])
def test_no_point_for_output_of(bench: CodeBench, name: str) -> None:
    outcome = bench.score(PROGRAMS["stream fails"][name], SUM_TESTS, **LIMITS)
    assert (outcome.kind, outcome.value) == ("scored", 0.0), outcome.reason
    assert_clean(bench)


@pytest.mark.parametrize("name", PROGRAMS["passes"])
def test_the_point_is_kept_and_nothing_left_by_what(namespaces: CodeBench, name: str) -> None:
    outcome = namespaces.score(PROGRAMS["passes"][name], ADD_TESTS, **LIMITS)
    assert outcome.value == 1.0, outcome.reason
    assert_clean(namespaces)


@pytest.mark.parametrize("name", PROGRAMS["stream passes"])
def test_the_point_for_output_is_kept_and_nothing_left_by_what(namespaces: CodeBench, name: str) -> None:
    outcome = namespaces.score(PROGRAMS["stream passes"][name], SUM_TESTS, **LIMITS)
    assert outcome.value == 1.0, outcome.reason
    assert_clean(namespaces)


def test_after_all_of_them_honest_programs_pass(bench: CodeBench) -> None:
    assert bench.score(ADD, ADD_TESTS).value == 1.0
    assert bench.score(SUM, SUM_TESTS).value == 1.0


def test_partial_credit_gives_no_point_for_tests_that_were_not_reached() -> None:
    bench = CodeBench(partial_credit=True, require="limits")
    dies = "import os\ndef add(a, b):\n    if a < 0: os._exit(0)\n    return a + b\n"
    outcome = bench.score(dies, ADD_TESTS)
    assert outcome.value == pytest.approx(2 / 3)
    assert bench.score("import os\nos._exit(0)\n", ADD_TESTS).value == 0.0
    bench.close()
