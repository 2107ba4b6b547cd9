"""Which test executes which line: coverage.py with one context per test, in the process of the tests and its children.

Names fixtures of a wider scope apart: their lines belong to every test that uses them, not to the first one alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "MUTATION_LINES"
ROOT = "MUTATION_ROOT"
CONTEXT = "MUTATION_CONTEXT"
PACKAGES = ("areal_like", "controller", "rollout", "trainer", "services")


def start_coverage(root: Path) -> Any:
    """Start measuring the copy's packages; nothing is written."""
    import coverage

    measured = coverage.Coverage(
        data_file=None, config_file=False, source=[str(root / package) for package in PACKAGES]
    )  # fmt: skip
    measured.start()
    return measured


def follow_in_child() -> None:
    """Record the lines of a process that a test started; called from the .pth file at every interpreter's start."""
    folder, root, context = (os.environ.get(name) for name in (FOLDER, ROOT, CONTEXT))
    if folder and root and context:
        _write_lines(Path(folder), root, context)


def _write_lines(folder: Path, root: str, context: str) -> None:
    """Write every line once, at its first execution: such processes mostly end by SIGKILL, without a last word."""
    try:
        file = os.open(folder / f"{os.getpid()}.lines", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.write(file, f"{context}\n".encode())
    except OSError:
        return
    wanted = tuple(f"{root}/{package}/" for package in PACKAGES)
    seen: set[tuple[str, int]] = set()

    def on_line(frame: Any, event: str, _: Any) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            with contextlib.suppress(OSError):  # a sandbox closes what it did not open
                os.write(file, f"{place[0]}:{place[1]}\n".encode())
        return on_line

    def on_call(frame: Any, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(wanted) else None

    sys.settrace(on_call)
    threading.settrace(on_call)


class LineMap:
    """Pytest plugin: the lines, the outcome and the time of every test of one file."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.fixtures: dict[str, set[str]] = defaultdict(set)
        """Tests by fixture of a wider scope."""
        self._measured = start_coverage(root)
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if os.environ.get(CONTEXT):
            self._measured.stop()
            _write_lines(self.folder, str(self.root), os.environ[CONTEXT])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def _switch(self, context: str) -> None:
        if os.getpid() == self._pid:
            os.environ[CONTEXT] = context
            self._measured.switch_context(context)

    def hooks(self) -> Any:
        """The part of the plugin that needs pytest at its definition."""
        import pytest

        plan = self

        class Hooks:
            @pytest.hookimpl(hookwrapper=True)
            def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
                for name in item.fixturenames:
                    plan.fixtures[name].add(item.nodeid)
                plan._switch(item.nodeid)
                yield
                plan._switch("import")

            @pytest.hookimpl(hookwrapper=True)
            def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
                before = os.environ.get(CONTEXT, "import")
                if fixturedef.scope != "function":
                    plan._switch(f"fixture {fixturedef.argname}")
                yield
                plan._switch(before)

        return Hooks()

    def result(self) -> dict[str, Any]:
        """Tests by line of every source file, and their times; those that failed are left out."""
        self._measured.stop()
        data = self._measured.get_data()
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for source in data.measured_files():
            for line, contexts in data.contexts_by_lineno(source).items():
                lines[self._name(source)][line] |= self._tests_of(contexts)
        for file in self.folder.glob("*.lines"):
            context, *places = file.read_text(errors="replace").splitlines()
            tests = self._tests_of([context])
            for source, _, line in (place.rpartition(":") for place in places):
                if line.isdecimal():
                    lines[self._name(source)][int(line)] |= tests
        return {
            "tests": {nodeid: seconds for nodeid, seconds in self.seconds.items() if nodeid not in self.failed},
            "lines": {name: {line: sorted(tests) for line, tests in of.items()} for name, of in lines.items()},
        }

    def _name(self, source: str) -> str:
        return Path(source).relative_to(self.root).as_posix()

    def _tests_of(self, contexts: list[str]) -> set[str]:
        found: set[str] = set()
        for context in contexts:
            is_fixture = context.startswith("fixture ")
            found |= self.fixtures[context.removeprefix("fixture ")] if is_fixture else {context}
        return found - self.failed - {"", "import"}
