"""Which tests execute a line of which module, with their times: built once per test file, kept by content."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from tests.mutation.targets import TESTS_OF_DECLARATIONS, is_test_of_core

FORMAT = "2"
"""Of what is kept; part of every key."""


@cache
def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def test_files(root: Path, patterns: Sequence[str] | None) -> list[Path]:
    """Files with unit tests of core modules that match one of the patterns (all without any), relative to the root.

    Those of declarations match every pattern.
    """
    files = (file.relative_to(root) for file in sorted((root / "tests").rglob("test_*.py")))
    wanted = (*(patterns or ("*",)), *TESTS_OF_DECLARATIONS)
    return [
        file for file in files
        if is_test_of_core(PurePosixPath(file)) and any(fnmatch(file.as_posix(), one) for one in wanted)
    ]  # fmt: skip


def helpers_digest(root: Path, file: Path) -> str:
    """Of the modules that tests of a folder share, and of all above it."""
    shared = [
        helper for folder in file.parents for helper in sorted((root / folder).glob("*.py"))
        if "tests" in folder.parts and not helper.name.startswith("test_")
    ]  # fmt: skip
    return hashlib.sha256("".join(digest(helper) for helper in shared).encode()).hexdigest()[:16]


class CoverageMap:
    """Tests by line. `find` says which tests can see a change of a statement."""

    def __init__(self, root: Path, kept: Path, *, how: str = "exact", patterns: Sequence[str] | None = None) -> None:
        """how: "exact" measures again whatever executed a module that changed; "quick" follows the lines of old maps
        through the changes, which chooses almost the same tests; "kept" measures nothing: of a test file
        that changed it knows the tests it had before, so its score is too low.
        patterns: of the test files that are measured and used; all without any."""
        self.root = root
        self.kept = kept
        self.how = how
        self.patterns = patterns
        self.seconds: dict[str, float] = {}
        self._by_line: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._by_module: dict[str, set[str]] = defaultdict(set)
        self._by_file: dict[str, set[str]] = {}
        self._of_declarations: set[str] = set()
        (kept / "sources").mkdir(parents=True, exist_ok=True)

    def build(self, measure: Callable[[str], dict[str, Any]], say: Callable[[str], None]) -> None:
        """Measure the files that are new, or that executed a module or use a helper that changed since."""
        files = test_files(self.root, self.patterns)
        for number, file in enumerate(files, 1):
            entry = self._kept(file)
            if entry is None and self.how == "kept":
                continue
            if entry is None:
                answer = measure(file.as_posix())
                if "lines" not in answer:
                    say(f"{file}: no map: {answer.get('error') or answer.get('tail', '')[-600:]}")
                    continue
                entry = self._keep(file, answer)
                say(f"[{number}/{len(files)}] {file}: {len(entry['tests'])} tests, {answer['seconds']:.1f} s")
            self._add(entry, file.as_posix())

    def _place(self, file: Path) -> Path:
        return self.kept / f"{'.'.join(file.with_suffix('').parts)}.json"

    def _kept(self, file: Path) -> dict[str, Any] | None:
        try:
            entry: dict[str, Any] = json.loads(self._place(file).read_text())
        except (OSError, ValueError):
            return None
        if entry["key"][0] != FORMAT or (self.how != "kept" and entry["key"][1] != digest(self.root / file)):
            return None
        if entry["key"][2] != helpers_digest(self.root, file) and self.how == "exact":
            return None
        changed = {name: sha for name, sha in entry["sources"].items() if digest(self.root / name) != sha}
        if changed and self.how == "exact":
            return None
        for name, sha in changed.items():
            entry["lines"][name] = self._followed(name, sha, entry["lines"][name])
        return entry

    def _followed(self, name: str, sha: str, by_line: dict[str, list[str]]) -> dict[str, list[str]]:
        """Tests by line of a module that changed: an equal line keeps its tests, one in its place takes them over."""
        now, before = self.root / name, self.kept / "sources" / sha
        if not now.is_file() or not before.is_file():
            return {}
        steps = difflib.SequenceMatcher(
            None, before.read_text().splitlines(), now.read_text().splitlines(), autojunk=False
        ).get_opcodes()
        found: dict[str, list[str]] = {}
        for _, old, old_end, new, new_end in steps:
            for line in range(new, new_end):
                nearest = min(old + (line - new), max(old_end - 1, 0))
                found[str(line + 1)] = by_line.get(str(nearest + 1), [])
        return found

    def _keep(self, file: Path, answer: dict[str, Any]) -> dict[str, Any]:
        entry = {
            "key": [FORMAT, digest(self.root / file), helpers_digest(self.root, file)],
            "sources": {name: digest(self.root / name) for name, lines in answer["lines"].items() if lines},
            "tests": answer["tests"], "lines": answer["lines"],
        }  # fmt: skip
        for name, sha in entry["sources"].items():
            (self.kept / "sources" / sha).write_bytes((self.root / name).read_bytes())
        self._place(file).write_text(json.dumps(entry))
        return entry

    def _add(self, entry: dict[str, Any], file: str = "") -> None:
        self._by_file[file] = set(entry["tests"])
        self.seconds.update(entry["tests"])
        self._of_declarations |= {test for test in entry["tests"] if test.split("::")[0] in TESTS_OF_DECLARATIONS}
        for name, by_line in entry["lines"].items():
            for line, nodeids in by_line.items():
                self._by_line[name][int(line)] += nodeids
                self._by_module[name].update(nodeids)

    def _tests_named_like(self, module: PurePosixPath) -> set[str]:
        """Tests of files with the module's name, in any folder of its package's tests."""
        return {
            test for file, tests in self._by_file.items()
            if PurePosixPath(file).name == f"test_{module.name}" and file.startswith(f"tests/{module.parts[0]}/")
            for test in tests
        }  # fmt: skip

    def find(self, module: str, first: int, last: int, function: tuple[int, int] | None) -> list[str]:
        """Tests that execute a statement; for code that runs at import, those that execute its function or module, or
        whose file is named like the module: a table has tests that execute none of its lines.

        The tests that happen to import the module see no more of such code than all others do.
        """
        lines = self._by_line[module]
        found: set[str] = set()
        if function and first > function[0]:
            found = {test for line in range(first, last + 1) for test in lines.get(line, ())}
        if not found and function:
            body = max(last, function[0]) + 1 if first <= function[0] else function[0]
            found = {test for line in range(body, function[1] + 1) for test in lines.get(line, ())}
        if not function:
            found = self._by_module[module] | self._tests_named_like(PurePosixPath(module)) | self._of_declarations
        return sorted(found or self._by_module[module], key=lambda test: self.seconds.get(test, 0.0))


def enclosing_function(source: bytes, line: int) -> tuple[int, int] | None:
    """First and last line of the innermost function around a line."""
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in _functions(ast.parse(source))]
    around = [span for span in spans if span[0] <= line <= span[1]]
    return max(around) if around else None


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
