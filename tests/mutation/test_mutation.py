"""The mutation runner itself: what it changes, and that it tells a weak test from a strong one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.mutation import fork_server
from tests.mutation.coverage_map import CoverageMap
from tests.mutation.draw import draw, named
from tests.mutation.operators import is_real, mutants
from tests.mutation.page import equivalents
from tests.mutation.targets import (
    LEFT_OUT,
    PACKAGES,
    TESTS_OF_DECLARATIONS,
    core_modules,
    is_match,
    reason_left_out,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def changed(source: str, operator: str) -> list[str]:
    """All real mutants of one operator."""
    found = [m for m in mutants(source.encode()) if m.operator == operator and is_real(m, source.encode())]
    return [mutant.apply(source.encode()).decode() for mutant in found]


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("compare", "x = a <= b", ["x = a < b"]),
        ("compare", "x = a not in b", ["x = a in b"]),
        ("compare", "x = 0 < (a) == b", ["x = 0 <= (a) == b", "x = 0 < (a) != b"]),
        ("andor", "x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("dropnot", "x = not a", ["x = a"]),
        ("plusminus", "x = a + b - c", ["x = a - b - c", "x = a + b + c"]),
        ("plusminus", "x = 'a' + b", []),
        ("plusminus", "x += 1", ["x -= 1"]),
        ("minmax", "x = max(a, b.min())", ["x = min(a, b.min())", "x = max(a, b.max())"]),
        ("constant", "x = f(True, 3, 'text')", ["x = f(False, 3, 'text')", "x = f(True, 4, 'text')"]),
        ("delcall", "async def f():\n    await g()", ["async def f():\n    pass"]),
        ("delcall", "log.info('x')", []),
        ("ifbody", "if a:\n    b = 1\n    c = 2\nelse:\n    d = 3", ["if a:\n    pass\nelse:\n    d = 3"]),
        ("return", "def f():\n    return a", ["def f():\n    return None"]),
        ("return", "def f():\n    a = 1\n    b(a)", ["def f():\n    return\n    b(a)"]),
        ("compare", "def f(x: Literal[1] = a > b) -> None:\n    assert x > 1", []),
    ],
)
def test_operators_change_what_they_say(operator: str, before: str, after: list[str]) -> None:
    found = changed(before, operator)
    if operator == "compare" and before.startswith("def"):
        found = [text for text in found if "assert x > 1" not in text]
    assert found == after


def test_statement_of_a_mutant_ends_before_the_body() -> None:
    source = b"def f(a=1):\n    if (\n        a > 1\n    ):\n        b = 2\n"
    spans = {(mutant.operator, mutant.line): mutant.statement for mutant in mutants(source)}
    assert spans["compare", 3] == (2, 4)
    assert spans["constant", 5] == (5, 5)
    assert spans["constant", 1] == (1, 1)


def test_statement_of_an_emptied_function_is_its_first_one_and_not_its_header() -> None:
    source = b"def f(a=1):\n    'text'\n    b(a)\n    c = 2\n"
    (emptied,) = [mutant for mutant in mutants(source) if mutant.operator == "return"]
    assert emptied.statement == (3, 3)


def test_code_that_runs_at_import_is_seen_by_the_tests_of_its_function_or_module(tmp_path: Path) -> None:
    tests = CoverageMap(tmp_path, tmp_path / "kept")
    lines = {"1": ["imports"], "3": ["imports"], "4": ["calls"], "5": ["calls", "goes_on"], "8": ["uses"]}
    tests._add({"tests": dict.fromkeys(("imports", "calls", "goes_on", "uses"), 0.1), "lines": {"m.py": lines}})
    assert set(tests.find("m.py", 1, 1, None)) == {"imports", "calls", "goes_on", "uses"}
    assert set(tests.find("m.py", 3, 3, (3, 5))) == {"calls", "goes_on"}
    assert tests.find("m.py", 4, 4, (3, 5)) == ["calls"]
    assert set(tests.find("m.py", 9, 9, (7, 9))) == {"uses"}, "a statement that no test executes: all of its function"


def test_code_that_runs_at_import_is_seen_by_the_tests_that_read_declarations(tmp_path: Path) -> None:
    assert all((REPOSITORY / file).is_file() for file in TESTS_OF_DECLARATIONS)
    declarations = TESTS_OF_DECLARATIONS[0]
    reads = f"{declarations}::test_reads"
    tests = CoverageMap(tmp_path, tmp_path / "kept")
    tests._add({"tests": {"uses": 0.1, reads: 0.2}, "lines": {"m.py": {"4": ["uses"]}}})
    assert set(tests.find("m.py", 1, 1, None)) == {"uses", reads}
    assert tests.find("m.py", 4, 4, (3, 5)) == ["uses"]
    tests._add({"tests": {"of the table": 0.1}, "lines": {}}, "tests/areal_like/test_table.py")
    tests._add({"tests": {"of another package's": 0.1}, "lines": {}}, "tests/trainer/test_table.py")
    assert set(tests.find("areal_like/table.py", 1, 1, None)) == {"of the table", reads}
    assert set(tests.find("areal_like/inner/table.py", 1, 1, None)) == {"of the table", reads}


def test_map_measures_and_uses_only_test_files_that_match_a_pattern(tmp_path: Path) -> None:
    for name in ("tests/trainer/data/test_a.py", "tests/trainer/test_b.py", "tests/rollout/test_c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "m.py").write_text("x = 1\n")
    asked: list[str] = []

    def measure(file: str) -> dict[str, object]:
        asked.append(file)
        return {"tests": {f"{file}::test": 0.1}, "lines": {"m.py": {"1": [f"{file}::test"]}}, "seconds": 0.1}

    kept = tmp_path / "kept"
    CoverageMap(tmp_path, kept).build(measure, lambda _: None)
    assert len(asked) == 3, "without a pattern: all"
    chosen = CoverageMap(tmp_path, tmp_path / "fresh", patterns=["tests/trainer/*", "tests/none/*"])
    asked.clear()
    chosen.build(measure, lambda _: None)
    assert asked == ["tests/trainer/data/test_a.py", "tests/trainer/test_b.py"]
    from_kept = CoverageMap(tmp_path, kept, patterns=["tests/rollout/*"])
    from_kept.build(measure, lambda _: None)
    assert from_kept.find("m.py", 1, 1, None) == ["tests/rollout/test_c.py::test"]


def test_every_pattern_of_what_is_left_out_matches_something_and_core_modules_stay_in() -> None:
    modules = core_modules(REPOSITORY)
    stems = {module.stem for module in modules}
    assert {"staleness", "encoding", "hub", "coordinator", "audit", "sample", "versions", "loss", "step"} <= stems
    decisive = ("controller/ledger/schema.py", "controller/data/job_rows.py", "rollout/agent/session.py")
    assert {*decisive, "controller/wiring/process_specs.py"} <= set(map(str, modules))
    everything = [
        PurePosixPath(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    assert not [pattern for pattern in LEFT_OUT if not any(is_match(module, pattern) for module in everything)]
    assert all(reason_left_out(module) == "" for module in modules)


def test_draw_depends_on_the_seed_alone() -> None:
    first, again, other = (draw(REPOSITORY, seed, 20, "areal_like/*") for seed in (1, 1, 2))
    assert [drawn.key for drawn in first] == [drawn.key for drawn in again]
    assert {drawn.key for drawn in first} != {drawn.key for drawn in other}
    place = first[0]
    assert place in named(REPOSITORY, [f"{place.module}:{place.mutant.line}:{place.mutant.operator}"])


def test_equivalent_mutants_have_a_reason() -> None:
    judged = equivalents(REPOSITORY / "tests" / "mutation" / "equivalent.txt")
    assert [key for key, reason in judged.items() if len(reason) <= 20] == []


def test_every_judged_mutant_changes_a_line_that_is_there() -> None:
    """So that no reason outlives the code that it is about."""
    gone = []
    for key in equivalents(REPOSITORY / "tests" / "mutation" / "equivalent.txt"):
        module, _, change = key.split(" | ", 2)
        before = change.split(" +", 1)[0].removeprefix("-").strip()
        pattern = ".*".join(re.escape(part) for part in re.split(r"\*| - ", before))
        if not re.search(pattern, " ".join((REPOSITORY / module).read_text().split())):
            gone.append(key)
    assert gone == []


def test_a_reason_is_that_of_all_keys_of_its_block(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.txt"
    file.write_text("# comment\n\none | a\ntwo | b\n    Both are\n    the same.\n\nthree | c\n    Other.\n")
    assert equivalents(file) == {
        "one | a": "Both are the same.",
        "two | b": "Both are the same.",
        "three | c": "Other.",
    }


MODULE = """
def weak(number: int) -> bool:
    return number > 10


def strong(number: int) -> bool:
    return number >= 10


def hangs(number: int) -> int:
    while number < 10:
        number += 1
    return number
"""
TESTS = """
from areal_like.toy import hangs, strong, weak


def test_weak():
    assert weak(20)


def test_strong():
    assert strong(10) and not strong(9)


def test_hangs():
    assert hangs(3) == 10
"""


def test_session_that_stands_in_the_queue_for_a_processor_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = 0.0
    monkeypatch.setattr(fork_server, "queued_s", lambda pid: queued)
    mine, limit_s = os.getpid(), 1e6
    assert not fork_server.is_over(mine, limit_s, 3.9e6)
    assert fork_server.is_over(mine, limit_s, 4.1e6)
    queued = 0.2e6
    assert not fork_server.is_over(mine, limit_s, 4.1e6)
    assert fork_server.is_over(mine, 1e-9, 1.0), "it has computed for longer than that"
    assert not fork_server.is_over(mine, 1e-9, 1e-10)


def test_queue_for_a_processor_is_measured_over_all_threads() -> None:
    assert 0.0 <= fork_server.queued_s(os.getpid()) < 1e6
    assert fork_server.queued_s(1 << 30) == 0.0, "a process that is gone waits for nothing"


@pytest.mark.e2e
@pytest.mark.thorough
def test_a_boundary_no_test_looks_at_survives_and_the_checkout_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "areal_like").mkdir()
    (tmp_path / "areal_like" / "toy.py").write_text(MODULE)
    shutil.copytree(REPOSITORY / "tests" / "mutation", tmp_path / "tests" / "mutation")
    (tmp_path / "tests" / "areal_like").mkdir()
    (tmp_path / "tests" / "areal_like" / "test_toy.py").write_text(TESTS)
    (tmp_path / ".gitignore").write_text("build/\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    places = [f"areal_like/toy.py:{line}:compare" for line in (3, 7)] + ["areal_like/toy.py:12:plusminus"]
    command = [
        sys.executable,
        "-m",
        "tests.mutation",
        "--budget-s=1",
        "--grace-s=4",
        *(f"--place={place}" for place in places),
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "survived          areal_like/toy.py:3 compare" in ran.stdout
    assert "killed            areal_like/toy.py:7 compare  tests/areal_like/test_toy.py::test_strong" in ran.stdout
    assert "timeout           areal_like/toy.py:12 plusminus" in ran.stdout
    assert "+    return number >= 10" in ran.stdout
    assert "score 2/3 = 66.7 %" in ran.stdout
    assert (tmp_path / "areal_like" / "toy.py").read_text() == MODULE
