"""Reads the tests and limits of a program from a row, in any of the common forms.

tests                          list of assert statements, or of {input, output}
test, entry_point, prompt      HumanEval: `test` defines `check(candidate)`
test_list, test_setup_code     MBPP; also test_imports, code (the reference), entry_point
inputs, outputs                code contests; also as a JSON text in `input_output`, as
public_tests, private_tests,   {input: [...], output: [...]}, and as lists of {input, output}
generated_tests
time_limit_s, memory_limit_mb (or memory_limit_bytes)   limits of this row's program
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from services.reward.judging.problem import Asserts, Streams
from services.reward.scorers.port import CannotJudge

STREAM_COLUMNS = ("public_tests", "private_tests", "generated_tests")


def problem_of(row: Mapping[str, Any]) -> Asserts | Streams:
    """The tests of a row. Raises CannotJudge if it has no tests, or none that can be parsed."""
    entry_point = _text(row, "entry_point")
    reference = _text(row, "code") or _text(row, "canonical_solution")
    setup = "\n".join([*_texts(row, "test_imports"), _text(row, "test_setup_code")]).strip()
    if row.get("tests"):
        tests = _decoded(row["tests"], "tests")
        if isinstance(tests, str):
            return Asserts((tests,), setup, entry_point=entry_point, reference=reference)
        if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
            return Asserts(tuple(tests), setup, entry_point=entry_point, reference=reference)
        return Streams(_pairs(tests, "tests"))
    if row.get("test_list"):
        tests = tuple(_texts(row, "test_list"))
        return Asserts(tests, setup, entry_point=entry_point, reference=reference)
    if _text(row, "test"):
        if "def check(" in row["test"] and not entry_point:
            raise CannotJudge("the row has a `test` with a check function, but no `entry_point`")
        # HumanEval's reference continues the prompt: its names are the prompt's, which are trusted anyway
        prompt = prompt_of(row)
        return Asserts((row["test"],), setup, is_check_function=True, entry_point=entry_point, prompt=prompt)
    return _streams_of(row)


def _streams_of(row: Mapping[str, Any]) -> Streams:
    source = _decoded(row["input_output"], "input_output") if row.get("input_output") else row
    if isinstance(source, Mapping) and source.get("inputs"):
        if source.get("fn_name"):
            raise CannotJudge("tests with `fn_name` are not supported; write `tests` as assert statements")
        return Streams(_pairs({"input": source["inputs"], "output": source.get("outputs")}, "inputs and outputs"))
    found = [pair for name in STREAM_COLUMNS if row.get(name) for pair in _pairs(_decoded(row[name], name), name)]
    if not found:
        raise CannotJudge("the row has no tests (looked for tests, test_list, test, inputs, public_tests)")
    return Streams(tuple(found))


def _pairs(tests: Any, column: str) -> tuple[tuple[str, str], ...]:
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("input"), tests.get("output")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise CannotJudge(f"{column}: expected lists of inputs and outputs of equal length")
        tests = [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list):
        raise CannotJudge(f"{column}: expected assert statements, or a list of inputs and outputs")
    pairs = []
    for number, test in enumerate(tests, 1):
        if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
            raise CannotJudge(f"{column}: test {number} lacks an input or an output")
        pairs.append((_stream(test["input"], column), _stream(test["output"], column)))
    return tuple(pairs)


def _stream(content: Any, column: str) -> str:
    if isinstance(content, list) and all(isinstance(line, str) for line in content):
        return "\n".join(content)
    if not isinstance(content, str):
        raise CannotJudge(f"{column}: an input or output is neither text nor a list of lines")
    return content


def _decoded(value: Any, column: str) -> Any:
    """Parse JSON in a text, as in some data sets; other text is returned unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        if column == "tests":
            return value
        raise CannotJudge(f"{column}: not JSON") from None


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CannotJudge(f"{name}: not a list of strings")
    return value


def prompt_of(row: Mapping[str, Any]) -> str:
    """HumanEval's prompt: the beginning of a program, which defines the entry point. Empty for any other prompt."""
    prompt, entry_point = _text(row, "prompt"), _text(row, "entry_point")
    # Prose may quote a signature; prepended to an answer it would make every program fail.
    defines = re.search(rf"^def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt if entry_point and defines is not None else ""


def time_limit_of(row: Mapping[str, Any], default_s: float, factor: float) -> float:
    """Seconds. Raises CannotJudge."""
    given = row.get("time_limit_s")
    return default_s if given is None else _positive(given, "time_limit_s") * factor


def memory_limit_of(row: Mapping[str, Any], default_bytes: int) -> int:
    """Bytes. Raises CannotJudge."""
    if row.get("memory_limit_mb") is not None:
        return int(_positive(row["memory_limit_mb"], "memory_limit_mb") * (1 << 20))
    given = row.get("memory_limit_bytes")
    return default_bytes if given is None else int(_positive(given, "memory_limit_bytes"))


def _positive(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise CannotJudge(f"{name} is not a positive number")
    return float(value)
