"""Why a row's tests cannot be used, in words that name the column; which of several forms counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.reward.judging.problem import Asserts, Streams
from services.reward.scorers.port import CannotJudge
from services.reward.scorers.program_rows import memory_limit_of, problem_of, prompt_of, time_limit_of
from services.reward.scorers.program_text import program_in

PAIRS = Streams((("1", "2"),))
LISTED = {"input": ["1"], "output": ["2"]}


def refusal(row: dict[str, Any]) -> str:
    with pytest.raises(CannotJudge) as raised:
        problem_of(row)
    return str(raised.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "the row has no tests (looked for tests, test_list, test, inputs, public_tests)"),
        ({"inputs": [], "outputs": []}, "the row has no tests"),
        ({"public_tests": {"input": [], "output": []}}, "the row has no tests"),
        ({"tests": 5}, "tests: expected assert statements, or a list of inputs and outputs"),
        ({"tests": [1]}, "tests: test 1 lacks an input or an output"),
        ({"tests": [{"input": "1", "output": "2"}, {"input": "1"}]}, "tests: test 2 lacks an input or an output"),
        ({"tests": [{"input": "1", "output": "2"}, {"output": "1"}]}, "tests: test 2 lacks an input or an output"),
        ({"tests": ["assert f()", LISTED]}, "tests: test 1 lacks an input or an output"),
        ({"tests": [{"input": 1, "output": "2"}]}, "tests: an input or output is neither text nor a list of lines"),
        ({"tests": [{"input": "1", "output": ["2", 3]}]}, "tests: an input or output is neither text"),
        ({"inputs": ["1"], "outputs": []}, "inputs and outputs: expected lists of inputs and outputs of equal length"),
        ({"inputs": ["1"]}, "inputs and outputs: expected lists of inputs and outputs of equal length"),
        ({"inputs": "1", "outputs": ["1"]}, "inputs and outputs: expected lists of inputs and outputs of equal length"),
        (
            {"private_tests": {"input": ["1"], "output": "2"}},
            "private_tests: expected lists of inputs and outputs of equal length",
        ),
        ({"generated_tests": "[{"}, "generated_tests: not JSON"),
        ({"input_output": "{broken"}, "input_output: not JSON"),
        (
            {"input_output": json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]})},
            "tests with `fn_name` are not",
        ),
        ({"test_list": "assert f()"}, "test_list: not a list of strings"),
        ({"test_list": ["assert f()", 1]}, "test_list: not a list of strings"),
        ({"tests": "assert 1", "test_imports": "import os"}, "test_imports: not a list of strings"),
        ({"test": "def check(candidate): pass"}, "the row has a `test` with a check function, but no `entry_point`"),
    ],
)
def test_row_that_cannot_be_judged_names_the_column_and_what_is_wrong(row: dict[str, Any], words: str) -> None:
    assert refusal(row).startswith(words)


def test_first_form_that_a_row_has_counts() -> None:
    forms: dict[str, Any] = {
        "tests": ["assert 1"], "test_list": ["assert 2"], "test": "assert 3", "input_output": json.dumps({
            "inputs": ["4"], "outputs": ["4"]}), "inputs": ["5"], "outputs": ["5"], "public_tests": LISTED,
    }  # fmt: skip
    expected: dict[str, Any] = {
        "tests": Asserts(("assert 1",)), "test_list": Asserts(("assert 2",)),
        "test": Asserts(("assert 3",), is_check_function=True), "input_output": Streams((("4", "4"),)),
        "inputs": Streams((("5", "5"),)), "public_tests": PAIRS,
    }  # fmt: skip
    for name in list(expected):
        assert problem_of(forms) == expected[name]
        del forms[name]


def test_empty_and_absent_columns_are_none() -> None:
    row = {"tests": [], "test_list": None, "test": "", "input_output": "", "inputs": None, "public_tests": LISTED}
    assert problem_of({**row, "private_tests": None, "generated_tests": ""}) == PAIRS


def test_all_columns_of_a_contest_count_in_their_order() -> None:
    row = {name: {"input": [name], "output": ["1"]} for name in ("generated_tests", "private_tests", "public_tests")}
    assert problem_of(row) == Streams((("public_tests", "1"), ("private_tests", "1"), ("generated_tests", "1")))


def test_text_that_only_looks_like_json_is_an_assert_in_tests_alone() -> None:
    assert problem_of({"tests": "[x for x in f()] == 1"}) == Asserts(("[x for x in f()] == 1",))
    assert problem_of({"tests": ' ["assert 1", "assert 2"]'}) == Asserts(("assert 1", "assert 2"))


def test_setup_entry_point_and_reference_go_with_asserts() -> None:
    more = {"test_imports": ["import a", "import b"], "test_setup_code": "c = 1\n", "entry_point": "f"}
    for row in ({"tests": "assert 1"}, {"tests": ["assert 1"]}, {"test_list": ["assert 1"]}):
        assert problem_of({**row, **more, "canonical_solution": "r"}) == Asserts(
            ("assert 1",), "import a\nimport b\nc = 1", entry_point="f", reference="r"
        )
    assert problem_of({"tests": "assert 1", "code": "c", "canonical_solution": "r"}) == Asserts(
        ("assert 1",), reference="c"
    )
    assert problem_of({"tests": "assert 1", "entry_point": 3, "code": 4}) == Asserts(("assert 1",))


def test_test_without_a_check_function_needs_no_entry_point() -> None:
    assert problem_of({"test": "assert f() == 1"}) == Asserts(("assert f() == 1",), is_check_function=True)


@pytest.mark.parametrize(
    ("prompt", "is_beginning"),
    [
        ("def f(x):\n", True), ("import os\ndef f(x):\n", True), ("Write def f.", False), ("def g(x):\n", False),
        ("def fun(x):\n", False), ("Write `def f(x)`:\n    def f(x):", False), ("@cache\ndef f(x):\n", True),
    ],
)  # fmt: skip
def test_prompt_begins_the_program_where_it_defines_the_entry_point(prompt: str, is_beginning: bool) -> None:
    assert prompt_of({"prompt": prompt, "entry_point": "f"}) == (prompt if is_beginning else "")
    assert prompt_of({"prompt": prompt}) == ""


@pytest.mark.parametrize("name", ["time_limit_s", "memory_limit_mb", "memory_limit_bytes"])
def test_limit_that_is_none_is_named(name: str) -> None:
    for value in (0, -1, "2", True, float("nan"), float("inf"), [1]):
        with pytest.raises(CannotJudge, match=f"{name} is not a positive number"):
            time_limit_of({name: value}, 1.0, 1.0) if name == "time_limit_s" else memory_limit_of({name: value}, 1)


def test_limits_are_those_of_the_row_and_null_is_none() -> None:
    assert time_limit_of({"time_limit_s": None}, 3.0, 2.0) == 3.0
    assert time_limit_of({"time_limit_s": 2}, 3.0, 1.5) == 3.0
    assert memory_limit_of({"memory_limit_mb": 1.5, "memory_limit_bytes": 7}, 100) == 3 << 19
    assert memory_limit_of({"memory_limit_mb": None, "memory_limit_bytes": 7.9}, 100) == 7
    assert memory_limit_of({"memory_limit_mb": None, "memory_limit_bytes": None}, 100) == 100


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("def f(x):\n    return 1", True), ("def f (x): return 1", True), ("async def f(x): ...", True),
        ("def f[T](x: T): ...", True), ("class f:\n    pass", True), ("f = lambda x: x", True),
        ("    def f(x): ...", False), ("def fun(x): ...", False), ("g = f = 1", False),
    ],
)  # fmt: skip
def test_answer_is_a_whole_program_where_it_defines_the_entry_point_at_the_top(text: str, is_whole: bool) -> None:
    prompt = "import a\n\n\ndef f(x):\n"
    whole, continued = f"import a\n\n\n{text}", prompt + (text if text[0] == " " else f"    {text}")
    assert program_in(text, prompt, "f") == (whole if is_whole else continued)
    assert program_in(text, prompt) == text, "without an entry point the prompt is no program"
    assert program_in(text, "", "f") == text
