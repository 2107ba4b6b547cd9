"""Runs one mutant after another: write it into the copy, run the tests that execute it, restore the copy."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.mutation.coverage_map import CoverageMap, enclosing_function
from tests.mutation.draw import Drawn

KILLED, AT_IMPORT, TIMEOUT, SURVIVED, UNCOVERED = "killed", "killed at import", "timeout", "survived", "no test"
FIRST_ROUND_S = 4.0
"""Quick tests kill most mutants; the others are not even imported for those."""
FILE_COST_S = 0.3
"""Of importing one more test file, without its tests."""


@dataclass(frozen=True)
class Result:
    drawn: Drawn
    outcome: str
    detail: str = ""
    """What killed it, or how many tests it survived."""


class ForkServer:
    """The process that forks test sessions (`fork_server.py`)."""

    def __init__(self, folder: Path) -> None:
        copy = folder / "copy"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
            "PATH": f"{folder / 'env' / 'bin'}:{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(folder / "env"),
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [folder / "env" / "bin" / "python", copy / "tests" / "mutation" / "fork_server.py", copy],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=copy,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the fork server ended: see its output above")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("wrong"):
            raise SystemExit(f"not the copy is what was imported: {answer['wrong'][:3]}")
        return answer

    def measure(self, file: str) -> dict[str, Any]:
        """Lines and times of the tests of one file."""
        return self.ask(kind="map", files=[file], limit_s=900.0)

    def run(self, tests: list[str], limit_s: float) -> dict[str, Any]:
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        return self.ask(kind="run", files=files, tests=tests, limit_s=limit_s)


class Trial:
    def __init__(self, copy: Path, server: ForkServer, tests: CoverageMap, *, budget_s: float, grace_s: float) -> None:
        self.copy = copy
        self.server = server
        self.tests = tests
        self.budget_s = budget_s
        self.grace_s = grace_s

    def run(self, drawn: Drawn, say: Callable[[str], None]) -> Result:
        file = self.copy / drawn.module
        file.write_bytes(drawn.mutated())
        try:
            result = self._judge(drawn)
        finally:
            file.write_bytes(drawn.source)
        say(f"{result.outcome:17} {drawn.place}  {result.detail}")
        return result

    def _judge(self, drawn: Drawn) -> Result:
        mutant = drawn.mutant
        function = enclosing_function(drawn.source, mutant.line)
        covering = self.tests.find(drawn.module, *mutant.statement, function)
        if not covering:
            return Result(drawn, UNCOVERED)
        num_run = 0
        for tests in self._rounds(covering):
            expected_s = self._cost(tests)
            answer = self.server.run(tests, limit_s=self.grace_s + 5.0 * expected_s)
            num_run += len(tests)
            if answer.get("died"):
                return Result(drawn, TIMEOUT if answer["timeout"] else KILLED, f"after {answer['seconds']:.0f} s")
            if answer["status"] not in (0, 5):  # 5: no test was collected
                outcome = AT_IMPORT if answer.get("at_import") else KILLED
                return Result(drawn, outcome, answer.get("killer") or answer.get("error", "")[-200:])
        return Result(drawn, SURVIVED, f"{num_run} of {len(covering)} covering tests were run")

    def _cost(self, tests: list[str]) -> float:
        files = {test.split("::")[0] for test in tests}
        return sum(self.tests.seconds[test] for test in tests) + FILE_COST_S * len(files)

    def _rounds(self, covering: list[str]) -> list[list[str]]:
        """Tests within the budget, those of the quickest files first; the first round is short."""
        by_file: dict[str, list[str]] = {}
        for test in covering:
            by_file.setdefault(test.split("::")[0], []).append(test)
        files = sorted(by_file.values(), key=self._cost)
        first: list[str] = []
        rest: list[str] = []
        spent_s = 0.0
        for group in files:
            spent_s += FILE_COST_S
            for test in group:
                spent_s += self.tests.seconds[test]
                if spent_s <= FIRST_ROUND_S or not first:
                    first.append(test)
                elif spent_s <= self.budget_s:
                    rest.append(test)
        return [tests for tests in (first, rest) if tests]
