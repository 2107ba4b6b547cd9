"""Streams that collect each file when they run it run the same tests, with the same results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import streams

FILES = {
    "conftest.py": f"""
import sys
sys.path.append({str(Path(streams.__file__).parent)!r})
import pytest, streams

def pytest_addoption(parser):
    parser.addoption("--by-file", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "costly: left out")
    streams.register(config)

@pytest.fixture(scope="session")
def once():
    yield []

@pytest.fixture(scope="module")
def of_module(once, request):
    once.append(request.node.name)
    yield once[-1]
    once.append("end of " + request.node.name)
""",
    "one/test_results.py": """
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
def test_numbers(number, of_module):
    assert number < 3 and of_module.endswith("test_results.py")

def test_skips():
    pytest.skip("not here")

@pytest.mark.costly
def test_costly():
    raise AssertionError

class TestGroup:
    def test_in_it(self, once, of_module):
        assert "end of" not in once[-1]
""",
    "two/test_left_out.py": """
import pytest
pytestmark = pytest.mark.costly

def test_costly():
    raise AssertionError
""",
    "three/test_broken.py": "import no_such_module",
    "three/test_after.py": """
def test_teardown_of_other_files_has_run(once, of_module):
    assert [name for name in once[:-1] if not name.startswith("end of ")] == [
        name.removeprefix("end of ") for name in once[:-1] if name.startswith("end of ")]
""",
}


def results(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit status, and a line for each test."""
    options = ["-p", "no:cacheprovider", "-rA", "-m", "not costly", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, sorted(set(re.findall(r"^(?:PASSED|FAILED|SKIPPED|ERROR) \S+", done.stdout, re.MULTILINE)))


@pytest.mark.processes
def test_results_are_those_of_one_process(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    usual = results(tmp_path)
    assert len(usual[1]) == 7, usual
    shared = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--by-file"]
    assert results(tmp_path, *shared) == (1, usual[1])
    named = "one/test_results.py::TestGroup::test_in_it"
    assert results(tmp_path, *shared, named) == (0, [f"PASSED {named}"])


def test_every_thorough_test_is_in_one_part() -> None:
    def item(name: str, *, is_thorough: bool = True) -> SimpleNamespace:
        marker = SimpleNamespace(args=()) if is_thorough else None
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: marker)

    names = [f"tests/test_x.py::test[{number}]" for number in range(60)]
    found = [[name for name in names if streams.is_in_part(item(name), streams.part_of(f"{k}/3"))] for k in (3, 7, 11)]
    assert sorted(name for part in found for name in part) == sorted(names)
    assert min(map(len, found)) > 10
    assert all(streams.is_in_part(item(name, is_thorough=False), (0, 3)) for name in names)


def test_thorough_tests_that_share_a_fixture_are_in_one_part() -> None:
    def item(file: int, fixture: str, number: int) -> SimpleNamespace:
        marker = SimpleNamespace(args=(fixture,))
        return SimpleNamespace(nodeid=f"tests/test_{file}.py::test[{number}]", get_closest_marker=lambda _: marker)

    chosen = [
        [streams.is_in_part(item(file, fixture, number), (0, 3)) for number in range(9)]
        for file in range(10)
        for fixture in ("stage", "world")
    ]
    assert all(len(set(each)) == 1 for each in chosen)
    assert {each[0] for each in chosen} == {True, False}


@pytest.mark.parametrize("text", ["", "1", "1/0", "-1/3", "a/b"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="write K/N"):
        streams.part_of(text)


def test_files_with_end_to_end_tests_come_first(tmp_path: Path) -> None:
    texts = {"test_unit.py": "", "test_other.py": "pytestmark = pytest.mark.e2e", "test_ray.py": "@pytest.mark.e2e"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = sorted(tmp_path.iterdir(), key=streams.turn)
    assert [path.name for path in found] == ["test_ray.py", "test_other.py", "test_unit.py"]
