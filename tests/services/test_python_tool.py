"""The tool `python` in a real sandbox."""

from __future__ import annotations

import asyncio

import pytest

from services.environment.tools import ToolEnvironment
from services.reward import python_tool
from tests.services.support.code_harness import layers_here

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def environment() -> ToolEnvironment:
    if layers_here().chosen not in ("namespaces", "landlock"):
        pytest.skip(f"no sandbox here: {layers_here().words}")
    return ToolEnvironment(tools=["python"])


def test_tool_declares_its_one_argument(environment: ToolEnvironment) -> None:
    (declared,) = asyncio.run(environment.reset({}, 1)).tools
    assert declared["function"]["name"] == "python"
    assert declared["function"]["parameters"]["required"] == ["code"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "[the program printed nothing]"),
        ("print(1)\n1 / 0", "1\n  File \"program.py\", line 2, in <module>\nZeroDivisionError: division by zero"),
        ("open('/etc/passwd')", "FileNotFoundError" if layers_here().chosen == "namespaces" else "PermissionError"),
        ("print('x' * 100_000)", "output limit of 64 kB"),
    ],
)  # fmt: skip
def test_result_is_what_the_program_prints_and_how_it_failed(
    environment: ToolEnvironment, code: str, words: str
) -> None:
    assert words in environment._tools["python"].run({"code": code})


def test_call_that_was_interrupted_leaves_no_answer_for_the_next(
    environment: ToolEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, judges = environment._tools["python"].run, python_tool._judges()

    def interrupt(task: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(judges, "judge", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run({"code": "print(1)"})
    assert run({"code": "print(2)"}) == "2"
