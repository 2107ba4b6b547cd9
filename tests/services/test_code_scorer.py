"""The code scorer on honest programs and tests of every kind: judged from outside as they would be from below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from code_harness import CodeBench

from areal_like.errors import UserError
from services.reward.composition import WeightedSum
from services.reward.config import RewardSettings, ScorerSettings, contradictions

pytestmark = pytest.mark.processes

VECTOR = (
    "class V:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n"
    "    def __add__(self, other): return V(self.x + other.x)\n    def __lt__(self, other): return self.x < other.x\n"
    "    def __repr__(self): return f'V({self.x})'\n    def __len__(self): return 3\ndef make(x): return V(x)\n"
)


def _read() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Programs with their tests, by group and name, from judged_programs.txt."""
    groups: dict[str, dict[str, tuple[str, list[str]]]] = {"right": {}, "wrong": {}}
    text = (Path(__file__).parent / "judged_programs.txt").read_text(encoding="utf-8")
    for part in text.split("#### ")[1:]:
        head, _, body = part.partition("\n")
        group, _, name = head.partition(": ")
        program, *tests = body.split("---- test\n")
        groups[group][name] = (program.replace("VECTOR\n", VECTOR), tests)
    return groups


RIGHT, WRONG = _read().values()


@pytest.mark.parametrize("name", RIGHT)
def test_an_honest_program_with(bench: CodeBench, name: str) -> None:
    outcome = bench.score(*RIGHT[name])
    assert (outcome.kind, outcome.value, outcome.components["correct"]) == ("scored", 1.0, 1.0), outcome.reason
    assert outcome.reason == "", "full strength"


@pytest.mark.parametrize("name", WRONG)
def test_no_point_for_a_program_with(bench: CodeBench, name: str) -> None:
    if "endless" in name:
        bench = CodeBench(total_limit_s=0.5, require="limits")
    outcome = bench.score(*WRONG[name])
    assert (outcome.kind, outcome.value) == ("scored", 0.0), outcome.reason
    assert outcome.reason


@pytest.mark.parametrize(
    "test",
    [
        "assert V(1) == V(1) and V(1) != V(2)", "assert V(1) + V(2) == V(3)", "assert make(3) == V(3)",
        "assert V(1) < V(2)", "assert isinstance(V(1), V)",
    ],
)  # fmt: skip
def test_objects_that_decide_are_a_weaker_mode_that_the_verdict_names(bench: CodeBench, test: str) -> None:
    outcome = bench.score(VECTOR, [test])
    assert outcome.value == 1.0, outcome.reason
    assert outcome.reason == "code: weaker mode: the verdict depends on objects of the program's own types (V)"
    assert outcome.components["code.weaker"] == 1.0


@pytest.mark.parametrize(
    "test", ["assert make(1) == 1", "assert make(1) == make(1)", "assert abs(make(1) - 1) < 2", "assert 5 in make(1)"]
)
def test_objects_that_the_test_did_not_make_decide_nothing(bench: CodeBench, test: str) -> None:
    agrees = (
        "class V(int):\n    __eq__ = __lt__ = __gt__ = __contains__ = lambda s, o: True\n    __sub__ = lambda s, o: s\n"
    )
    agrees = agrees.replace("(int)", "") + "    __abs__ = lambda s: s\ndef make(x): return V()\n"
    assert bench.score(agrees, [test]).value == 0.0


def test_the_weaker_mode_can_be_refused() -> None:
    bench = CodeBench(own_classes="invalid", require="limits")
    outcome = bench.score(VECTOR, ["assert V(1) == V(1)"])
    assert (outcome.kind, outcome.value) == ("invalid", None)
    assert "own classes" in outcome.reason
    assert bench.score(VECTOR, ["assert V(1).x == 1"]).value == 1.0
    bench.close()


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (["assert f( == 1"], "SyntaxError"),
        (["import no_such_module\nassert f(1) == 1"], "no_such_module"),
        (["assert f(object()) == 1"], "object of type object"),
        (["class Mine: pass\nassert f(Mine()) == 1"], "object of type Mine"),
        ([], "no tests"),
    ],
)
def test_tests_that_cannot_be_used_are_no_programs_fault(bench: CodeBench, tests: list[str], words: str) -> None:
    outcome = bench.score("def f(x): return x\n", tests)
    assert outcome.kind == "invalid"
    assert words in outcome.reason


STREAMS: dict[str, tuple[str, str, str]] = {
    "sums": ("print(sum(map(int, input().split())))", "1 2\n", "3"),
    "reads all at once": ("import sys\nprint(len(sys.stdin.read()))", "x" * 300_000, "300000"),
    "reads by number": ("import os\nprint(len(os.read(0, 5)))", "abcdefg", "5"),
    "opens its input by name": ("print(open('/dev/stdin').read()[::-1])", "abc", "cba"),
    "writes much": ("import sys\nsys.stdout.write('x' * 1_000_000)", "", "x" * 1_000_000),
    "speaks other languages": ("print(input()[::-1])", "äöé語\n", "語éöä"),
    "exits by itself": ("import sys\nprint(3)\nsys.exit()", "", "3"),
    "quits": ("print(3)\nexit(0)", "", "3"),
    "works in a thread with a large stack": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def r(n): return 0 if n == 0 else 1 + r(n - 1)\nthreading.Thread(target=lambda: print(r(50_000))).start()",
        "", "50000",
    ),
    "runs an event loop": ("import asyncio\nasync def m(): print(3)\nasyncio.run(m())", "", "3"),
    "prints at its exit": ("import atexit\natexit.register(print, 3)", "", "3"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_program_that(bench: CodeBench, name: str) -> None:
    if "by name" in name and not bench.label.endswith("namespaces"):
        pytest.skip("this layer leaves no file to write")
    program, given, expected = STREAMS[name]
    outcome = bench.score(program, [{"input": given, "output": expected}])
    assert outcome.value == 1.0, outcome.reason


def test_every_input_is_a_process_of_its_own(bench: CodeBench) -> None:
    program = "import sys\nprint(len(sys.modules.get('seen', '')) + int(input()))\nsys.modules['seen'] = 'x'\n"
    assert bench.score(program, [{"input": f"{n}\n", "output": f"{n}"} for n in range(6)]).value == 1.0


@pytest.fixture(scope="module")
def partial() -> Iterator[CodeBench]:
    bench = CodeBench(partial_credit=True, float_tolerance=1e-6, require="limits")
    yield bench
    bench.close()


def test_partial_credit_is_the_share_of_tests_passed(partial: CodeBench) -> None:
    program = "def f(x):\n    import os\n    if x == 2: os._exit(0)\n    return 1 / (x - 3) if x == 3 else x\n"
    tests = [
        "y = 5",
        "assert f(1) == 1",
        "assert f(2) == 2",
        "assert f(y) == 5",
        "assert f(3) == 3",
        "assert f(1) == 1.0000000001",
    ]
    outcome = partial.score(program, tests)
    assert outcome.value == pytest.approx(3 / 5)
    assert outcome.components["correct"] == 0.0
    assert "test 3: it ended early (exit status 0)" in outcome.reason
    assert "ZeroDivisionError" in outcome.reason


def test_partial_credit_counts_inputs(partial: CodeBench) -> None:
    program = "n = int(input())\nif n == 2: 1 / 0\nwhile n == 3: pass\nprint(n + 1e-9)\n"
    tests = [{"input": f"{n}", "output": f"{n}"} for n in (1, 2, 3, 4)]
    assert partial.score(program, tests, time_limit_s=0.3).value == 0.5


HUMAN = {
    "prompt": 'def helper(x):\n    return x\n\n\ndef f(x):\n    """Doc."""\n',
    "entry_point": "f",
    "test": (
        "def check(candidate):\n    assert candidate(1) == helper(1)\n"
        "    for i in range(3):\n        assert candidate(i) == i\n"
    ),
}


@pytest.mark.parametrize(
    ("response", "value", "share"),
    [
        ("    return x\n", 1.0, 1.0),
        ("    return 1\n", 0.0, 0.5),
        ("Sure:\n```python\ndef f(x):\n    return x\n```", 1.0, 1.0),
        ("```python\ndef helper(x):\n    return 7\ndef f(x):\n    return x if x != 1 else 7\n```", 0.0, 0.5),
        ("    import os; os._exit(0)\n", 0.0, 0.0),
    ],
)
def test_a_check_function_calls_the_entry_point(
    bench: CodeBench, partial: CodeBench, response: str, value: float, share: float
) -> None:
    assert bench.answer(HUMAN, response).value == value
    assert partial.answer(HUMAN, response).value == share


def test_a_helper_of_the_prompt_must_satisfy_in_both_versions(bench: CodeBench) -> None:
    lies = "```python\ndef helper(x):\n    return 2\ndef f(x):\n    return x if x != 1 else 2\n```"
    row = HUMAN | {"test": "def check(candidate):\n    assert candidate(1) == helper(1)\n"}
    assert bench.answer(row, lies).value == 0.0, "the prompt's helper says otherwise"
    broken = "```python\ndef helper(x):\n    return 2\ndef f(x):\n    return x\n```"
    assert bench.answer(row, broken).value == 0.0, "so does its own"


def test_an_answer_without_a_program_is_wrong(bench: CodeBench) -> None:
    outcome = bench.answer({"tests": ["assert f(1) == 1"]}, "\n ")
    assert (outcome.value, outcome.reason) == (0.0, "code: the answer contains no program")


def test_an_answer_that_was_cut_is_wrong_where_asked() -> None:
    bench = CodeBench(must_stop=True, require="limits")
    row = {"tests": ["assert f(1) == 1"]}
    assert bench.answer(row, "def f(x): return x", "length").value == 0.0
    assert bench.answer(row, "def f(x): return x", "stop").value == 1.0
    bench.close()


def test_a_reference_next_to_the_answer_is_not_what_is_scored(bench: CodeBench) -> None:
    row = {"program": "def f(x): return x", "tests": ["assert f(1) == 1"]}
    assert bench.answer(row, "def f(x): return 2").value == 0.0
    assert bench.answer(row, row["program"]).value == 1.0


def test_code_works_with_other_scorers() -> None:
    scorers = (
        ScorerSettings(kind="code", options={"require": "limits"}),
        ScorerSettings(kind="format", options={"must_stop": True}),
    )
    assert WeightedSum.from_settings(scorers).names == ["code", "format"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout_s": 5.0}, "scorers.0.options.total_limit_s"),
        ({"max_memory_mb": 2048}, "scorers.0.options.max_memory_limit_mb"),
        ({"options": {"compare": "words"}}, "compare"),
        ({"options": {"time_limit": 3}}, "time_limit"),
        ({"options": {"require": "docker"}}, "require"),
    ],
)
def test_options_that_cannot_work_are_refused_before_a_run(settings: dict[str, Any], words: str) -> None:
    options = settings.pop("options", {})
    reward = RewardSettings.model_validate({"scorers": [{"kind": "code", "options": options}], **settings})
    ((key, what, remedy),) = contradictions(reward)
    assert words in key
    assert what
    assert remedy
    if options:
        with pytest.raises(UserError, match=words):
            CodeBench(**options)
