"""Which part of an answer is the program, and which columns of a row are its tests."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.judging.problem import Asserts, Streams, Task
from services.reward.scorers.port import CannotJudge
from services.reward.scorers.program_rows import memory_limit_of, problem_of, prompt_of, time_limit_of
from services.reward.scorers.program_text import program_in

PROMPT = 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef f(x):\n    """Doc."""\n'


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```", "x = 2"),
        ("```py\nx = 1\n```\nrun:\n```bash\npython x.py\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\noutput:\n```\n1\n```", "x = 1"),
        ("```Python3 title='a'\nx = 1\n```", "x = 1"),
        ("```{.python}\nx = 1\n```", "x = 1"),
        ("~~~python\nx = '```'\n~~~", "x = '```'"),
        ("  ```python\n  x = 1\n  ```", "  x = 1"),
        ("````python\nx = 1\n```\n````", "x = 1\n```"),
        ("```python\nx = 1\ny = ", "x = 1\ny = "),
        ("```python\n```", ""),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python\ns = 'a ``` b'\n```", "s = 'a ``` b'"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_the_program_is_the_last_block_of_python_or_else_the_whole(response: str, program: str) -> None:
    assert program_in(response) == program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("    return x\n", PROMPT + "    return x\n"),
        ("return x", PROMPT + "    return x"),
        ("\n\n    return x", PROMPT + "\n\n    return x"),
        ("```python\n    return x\n```", PROMPT + "    return x"),
        ("```python\ndef f(x):\n    return x\n```", PROMPT.partition("def f")[0] + "def f(x):\n    return x"),
        ("def f(x):\n    return x", PROMPT.partition("def f")[0] + "def f(x):\n    return x"),
        ("", ""),
    ],
)
def test_a_completion_goes_below_its_prompt_and_a_whole_function_below_its_imports(response: str, program: str) -> None:
    assert program_in(response, PROMPT, "f") == program


def test_finding_a_block_takes_time_in_proportion_to_the_answer() -> None:
    assert program_in("```python\n" * 200_000) == "```python\n" * 199_999
    assert program_in("`" * 1_000_000) == ""


def test_rows_of_every_form_are_read() -> None:
    asserts = ["assert f(1) == 1", "assert f(2) == 2"]
    assert problem_of({"tests": asserts}) == Asserts(tuple(asserts))
    assert problem_of({"tests": "assert f(1) == 1\n"}) == Asserts(("assert f(1) == 1\n",))
    mbpp = {"test_list": asserts, "test_setup_code": "x = 1", "test_imports": ["import math"], "code": "def f(): 0"}
    assert problem_of(mbpp) == Asserts(tuple(asserts), "import math\nx = 1", reference="def f(): 0")
    human = {"prompt": PROMPT, "test": "def check(candidate):\n    assert candidate(1)", "entry_point": "f"}
    assert problem_of(human) == Asserts((human["test"],), "", True, "f", PROMPT)
    pairs = Streams((("1\n", "2\n"), ("3", "4")))
    assert problem_of({"tests": [{"input": "1\n", "output": "2\n"}, {"input": "3", "output": "4"}]}) == pairs
    assert problem_of({"tests": '[{"input": "1\\n", "output": "2\\n"}, {"input": "3", "output": "4"}]'}) == pairs
    assert problem_of({"inputs": ["1\n", "3"], "outputs": ["2\n", "4"]}) == pairs
    assert problem_of({"input_output": '{"inputs": ["1\\n", "3"], "outputs": ["2\\n", "4"]}'}) == pairs
    both = {"public_tests": {"input": ["1\n"], "output": ["2\n"]}, "private_tests": {"input": ["3"], "output": ["4"]}}
    assert problem_of(both | {"generated_tests": {"input": [], "output": []}}) == pairs
    assert problem_of({"inputs": [["1", "2"]], "outputs": [["3"]]}) == Streams((("1\n2", "3"),))


@pytest.mark.parametrize(
    "row",
    [
        {}, {"tests": []}, {"tests": [1]}, {"tests": [{"input": "1"}]}, {"tests": ["assert f()", {"input": "1"}]},
        {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}, {"input_output": "{broken"}, {"test_list": "assert f()"},
        {"test": "def check(candidate): pass"}, {"public_tests": {"input": ["1"], "output": [2]}},
        {"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [1]}'}, {"tests": 5},
    ],
    ids=repr,
)  # fmt: skip
def test_a_row_without_usable_tests_cannot_be_judged(row: dict[str, Any]) -> None:
    with pytest.raises(CannotJudge):
        problem_of(row)


def test_a_prompt_that_does_not_begin_the_program_is_none_of_its() -> None:
    assert prompt_of({"prompt": "Write a function f.", "entry_point": "f"}) == ""
    assert prompt_of({"prompt": [{"role": "user"}], "entry_point": "f"}) == ""


def test_limits_of_a_row_come_before_those_of_the_options() -> None:
    assert time_limit_of({}, 3.0, 2.0) == 3.0
    assert time_limit_of({"time_limit_s": 1.5}, 3.0, 2.0) == 3.0
    assert memory_limit_of({}, 100) == 100
    assert memory_limit_of({"memory_limit_mb": 2}, 100) == 2 << 20
    assert memory_limit_of({"memory_limit_bytes": 256000000}, 100) == 256000000
    for bad in (0, -1, "2", True, float("nan"), float("inf")):
        with pytest.raises(CannotJudge):
            time_limit_of({"time_limit_s": bad}, 3.0, 1.0)
        with pytest.raises(CannotJudge):
            memory_limit_of({"memory_limit_mb": bad}, 100)


def test_a_task_crosses_the_pipe_unchanged() -> None:
    import json

    for problem in (Asserts(("assert f()",), "x = 1", True, "f", "p", "r"), Streams((("a", "b"), ("c", "\ud800")))):
        task = Task("x\0\ud800", problem, {"time_s": 1.0}, 2.0, True, 0.5, "lines")
        assert Task.of(json.loads(json.dumps(task.as_dict()))) == task
