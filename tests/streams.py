"""How streams of tests (`pytest -n 3 --dist loadfile --by-file`) share the files.

pytest-xdist lets every stream import and collect all tests before the first one runs. With `--by-file` a stream starts
with an item for each file, and imports and collects a file when it runs it, so that each file is collected once. Test
names on the command line (`FILE::TEST`) need pytest's own collection, which is then used.
"""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

LONGEST_FIRST = (
    "test_controls", "test_sglang_job", "test_vllm_job", "test_engine_conformance", "test_ray", "test_layouts",
    "test_ranks", "test_report_browser", "test_trainer_ranks", "test_readme_commands", "test_faults", "test_main_job",
    "test_diagnosis", "test_equalities", "test_offline", "test_traffic", "test_quick_forms", "test_docs_site",
)  # fmt: skip
"""Of the files with end-to-end tests. The first makes the warm start that most others share; the next do without."""


@cache
def turn(path: Path) -> tuple[bool, int]:
    """Sort key: files with end-to-end tests first, so that streams that take a file each end together."""
    place = LONGEST_FIRST.index(path.stem) if path.stem in LONGEST_FIRST else len(LONGEST_FIRST)
    return "mark.e2e" not in path.read_text(encoding="utf-8"), place


def part_of(text: str) -> tuple[int, int]:
    """`--thorough-part K/N` as K modulo N and N. Raises UsageError."""
    number, _, count = text.partition("/")
    if not number.isdecimal() or not count.isdecimal() or int(count) == 0:
        raise pytest.UsageError(f"--thorough-part {text}: write K/N, two whole numbers, N at least 1")
    return int(number) % int(count), int(count)


def is_in_part(item: pytest.Item, part: tuple[int, int]) -> bool:
    """Return whether a test runs where one of several parts of the thorough tests is asked for.

    Tests of a file whose mark names the same fixture, `thorough(fixture)`, are in one part, which makes it once.
    """
    marker = item.get_closest_marker("thorough")
    if marker is None:
        return True
    name = f"{item.nodeid.partition('::')[0]} {marker.args[0]}" if marker.args else item.nodeid
    return zlib.crc32(name.encode()) % part[1] == part[0]


def freeze() -> None:
    """What was imported and collected stays: no garbage collection looks through millions of its objects again."""
    gc.collect()
    gc.freeze()


def is_stream() -> bool:
    """Return whether this process is one of several streams."""
    return "PYTEST_XDIST_WORKER" in os.environ


def register(config: pytest.Config) -> None:
    """Let this process collect files when it runs them, if it is a stream that was asked to."""
    if config.getoption("--by-file") and is_stream() and not any("::" in one for one in config.args):
        config.pluginmanager.register(ByFile(), "by-file")


class FileItem(pytest.Item):
    """All tests of a file."""

    def runtest(self) -> None:
        raise AssertionError("the tests of the file run instead")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.nodeid


class UncollectedFile(pytest.File):
    """A test file that has not been imported."""

    def collect(self) -> Iterator[pytest.Item]:
        yield FileItem.from_parent(self, name="tests")


class ByFile:
    """The plugin of a stream."""

    def __init__(self) -> None:
        self._is_collecting_files = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> UncollectedFile | None:
        return UncollectedFile.from_parent(parent, path=module_path) if self._is_collecting_files else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Keep items of files from being deselected: marks are those of the tests."""
        if not self._is_collecting_files:
            return (yield)
        files = sorted(items, key=lambda item: turn(item.path))
        items.clear()
        yield
        items[:] = files
        self._is_collecting_files = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Collect the file and run its tests."""
        if not isinstance(item, FileItem):
            return None
        session = item.session
        place = session.items.index(item)
        file = cast(pytest.File, item.parent)
        tests = list(session.genitems(pytest.Module.from_parent(file.parent, path=file.path)))
        item.config.hook.pytest_collection_modifyitems(session=session, config=item.config, items=tests)
        freeze()
        for number, test in enumerate(tests, start=1):
            session.items[place] = test  # pytest-xdist compares reports with it
            following = tests[number] if number < len(tests) else nextitem
            item.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = item
        if not tests:  # nothing else tears down what the previous test shares with this file's place alone
            session._setupstate.teardown_exact(nextitem)
        return True
