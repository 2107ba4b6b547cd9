"""Claims about tests that are Python, with the program in this process: what counts, whose names are whose."""

from __future__ import annotations

import json
from typing import Any

import pytest
from program_here import ProgramHere, judged

from services.reward.judging.assertions import MAX_REASON_CHARS, TIME_IS_OVER
from services.reward.judging.names import Hints, made_names, make_hints, names_of_reference, needed_names
from services.reward.judging.problem import Findings, Unjudgeable
from services.reward.judging.rewriting import are_close

ADD = "def add(a, b):\n    return a + b\n"


def passes(program: str, *tests: str, **more: Any) -> bool:
    found = judged(program, *tests, **more)
    assert found.num_tests >= 1
    assert (found.num_passed == found.num_tests) == (not found.failures)
    return not found.failures


def why(program: str, *tests: str, **more: Any) -> str:
    """The first failure."""
    return judged(program, *tests, **more).failures[0]


# ---------------------------------------------------------------- running tests


def test_all_tests_pass_or_the_first_that_fails_is_named_and_ends_it() -> None:
    found = judged(ADD, "assert add(1, 2) == 3", "assert add(0, 0) == 0")
    assert (found.num_tests, found.num_passed, found.failures) == (2, 2, [])
    found = judged(ADD, "assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add(2, 2) == 5")
    assert (found.num_tests, found.num_passed, found.failures) == (3, 1, ["test 2: AssertionError"])


def test_with_partial_credit_every_test_counts() -> None:
    tests = ["assert add(1, 1) == 3", "assert add(1, 2) == 3", "assert add(1, 1) == 4", "assert add(2, 2) == 4"]
    found = judged(ADD, *tests, partial_credit=True)
    assert (found.num_tests, found.num_passed) == (4, 2)
    assert found.failures == ["test 1: AssertionError", "test 3: AssertionError"]


def test_code_without_an_assert_prepares_and_is_no_test() -> None:
    found = judged(ADD, "one = 1", "assert add(one, 2) == 3")
    assert (found.num_tests, found.num_passed) == (1, 1)
    found = judged(ADD, "add(1, 2)", "if add(1, 1) != 2: raise ValueError")
    assert (found.num_tests, found.num_passed) == (2, 2), "where none has an assert, each of them is a test"


def test_program_that_died_gets_a_new_process_for_the_tests_left_with_all_that_prepared_them() -> None:
    source = ProgramHere("n = 0\ndef f(x):\n    global n\n    n += 1\n    if x == 2: die()\n    return n\n")
    tests = ["base = 1", "assert f(base) == 1", "assert f(2) == 2", "assert f(base) == 1", "assert f(base) == 2"]
    found = judged(source, *tests, partial_credit=True)
    assert (found.num_tests, found.num_passed) == (4, 3)
    assert found.failures == ["test 3: it ended early (exit status 0)"]
    assert source.num_starts == 2
    source = ProgramHere("def f(x):\n    die()\n")
    assert judged(source, "assert f(1)", "assert f(2)").failures == ["test 1: it ended early (exit status 0)"]
    assert source.num_starts == 1, "without partial credit the rest is not run"


def test_death_that_a_test_swallows_is_a_failure_all_the_same() -> None:
    program = "def f():\n    die()\n"
    assert why(program, "try:\n    f()\nexcept BaseException:\n    pass\nassert True") == (
        "test 1: it ended early (exit status 0)"
    )


def test_time_that_is_over_before_a_new_process_fails_the_rest() -> None:
    source = ProgramHere("def f(x):\n    die()\n", num_starts=1)
    found = judged(source, "assert f(1)", "assert f(2)", "assert f(3)", partial_credit=True)
    assert (found.num_tests, found.num_passed) == (3, 0)
    assert found.failures == ["test 1: it ended early (exit status 0)", TIME_IS_OVER]
    assert judged(ProgramHere(ADD, num_starts=0), "assert add(1, 1) == 2").failures == [TIME_IS_OVER]


def test_program_that_does_not_even_load_fails_once() -> None:
    source = ProgramHere("1 / 0")
    found = judged(source, "assert 1", "assert 2", partial_credit=True)
    assert (found.num_tests, found.num_passed) == (2, 0)
    assert found.failures == ["the program: the program raises ZeroDivisionError: division by zero"]
    assert source.num_starts == 1
    assert why("die()", "assert 1") == "the program: it ended early (exit status 0)"
    assert why("def f(:\n", "assert 1").startswith("the program: the program raises SyntaxError")


def test_setup_runs_before_the_tests_of_every_process() -> None:
    assert passes(ADD, "assert add(x, 1) == 8", setup="x = 7")
    assert why(ADD, "assert x", setup="x = 1 / 0") == "the set-up of its tests: ZeroDivisionError: division by zero"
    assert why("def f():\n    die()\n", "assert 1", setup="f()") == (
        "the set-up of its tests: it ended early (exit status 0)"
    )


def test_tests_share_one_process_and_its_state() -> None:
    program = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)\n"
    assert passes(program, "assert f(1) == 1", "assert f(1) == 2")


def test_failure_says_who_raised_what() -> None:
    program = "class Odd(ValueError): pass\ndef f(x):\n    raise Odd('so   it\\nis')\n"
    assert why(program, "assert f(1)") == "test 1: the program raises Odd: so it is"
    assert why(ADD, "assert add(1, 2)[0]").startswith("test 1: TypeError: ")
    assert why(ADD, "raise ValueError\nassert 1") == "test 1: ValueError"
    assert len(why(ADD, f"raise ValueError({'x' * 500!r})\nassert 1")) == MAX_REASON_CHARS + len("test 1: ")
    assert why(ADD, "import sys\nsys.exit(3)\nassert 1") == "test 1: SystemExit: 3", "a test may not end its judge"


def test_text_of_an_error_that_cannot_be_shown_is_left_out() -> None:
    odd = "class Odd(Exception):\n    def __str__(self): raise ValueError\n"
    assert why(ADD, f"{odd}raise Odd\nassert 1") == "test 1: Odd"


def test_tests_may_print_and_nobody_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert passes(ADD, "import sys\nprint(add(1, 2))\nprint(1, file=sys.stderr)\nassert 1")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert passes(ADD, "import sys\nassert sys.stdout.writable()\nassert sys.stdout.write('four') == 4")


def test_random_tests_give_the_same_verdict_twice() -> None:
    program = "seen = []\ndef f(x):\n    seen.append(x)\n    return x\n"
    test = "import random\nassert f(random.random()) == -1, 'x'"
    first, second = ProgramHere(program), ProgramHere(program)
    judged(first, test)
    judged(second, test)
    assert first.questions == second.questions
    assert any("0.8444" in question for question in first.questions), "the seed is 0"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (("assert f( == 1",), "SyntaxError"),
        (("import no_such_module\nassert 1",), "a test cannot be run (ModuleNotFoundError"),
        (("from no_such.deep import x\nassert 1",), "a test cannot be run (ModuleNotFoundError"),
        (("assert add(object(), 1)",), "object of type object, which cannot be passed to a sandbox"),
        (("try:\n    add(object(), 1)\nexcept Exception:\n    pass\nassert 1",), "object of type object"),
    ],
)
def test_tests_that_cannot_be_used_are_no_programs_fault(tests: tuple[str, ...], words: str) -> None:
    with pytest.raises(Unjudgeable) as raised:
        judged(ADD, *tests)
    assert words in str(raised.value)
    with pytest.raises(Unjudgeable, match="SyntaxError"):
        judged(ADD, "assert 1", setup="def (")


def test_missing_module_that_the_program_or_no_test_imports_is_the_programs_fault() -> None:
    assert why("import no_such_module", "assert 1").startswith("the program: the program raises ModuleNotFoundError")
    program = "def f():\n    import no_such_module\n"
    assert "the program raises ModuleNotFoundError" in why(program, "import math\nassert f()")
    assert "ImportError" in why(ADD, "raise ImportError('x', name='other')\nassert 1")


# ---------------------------------------------------------------- check functions

CHECK = {"is_check_function": True, "entry_point": "f"}
CHECKING = (
    "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i\n    assert candidate(9) == 9\n"
)


def test_check_is_called_with_the_entry_point() -> None:
    assert passes("def f(x): return x\n", CHECKING, **CHECK)
    assert why("def f(x): return 0\n", CHECKING, **CHECK) == "test 1: AssertionError"
    assert why("def g(x): return x\n", CHECKING, **CHECK) == "test 1: the program does not define f"
    assert passes("def f(x): return x\n", "assert f(1) == 1", **CHECK), "without a check the code is the test"


def test_asserts_of_a_check_count_each_with_partial_credit() -> None:
    found = judged("def f(x): return x if x != 1 else 7\n", CHECKING, partial_credit=True, **CHECK)
    assert (found.num_tests, found.num_passed, found.failures) == (4, 3, ["test 2: AssertionError"])
    found = judged("def f(x): return x\n", CHECKING, partial_credit=True, **CHECK)
    assert (found.num_tests, found.num_passed, found.failures) == (4, 4, [])
    found = judged("def f(x): return x / 0 if x == 9 else x\n", CHECKING, partial_credit=True, **CHECK)
    assert (found.num_tests, found.num_passed, found.failures) == (4, 3, ["test 4: ZeroDivisionError"])


def test_asserts_that_a_check_does_not_come_to_count_as_failed() -> None:
    begins = "def check(candidate):\n    assert candidate(1) == 1\n    candidate(2)\n"
    check = f"{begins}    assert 1\n    assert 2\n    assert 3\n"
    found = judged("def f(x): return 1 / (2 - x)\n", check, partial_credit=True, **CHECK)
    assert (found.num_tests, found.num_passed) == (4, 1)
    assert found.failures == ["the program raises ZeroDivisionError: division by zero"]
    check = "def check(candidate):\n    assert candidate(1) == 1\n    candidate(2)\n"
    found = judged("def f(x): return 1 / (2 - x)\n", check, partial_credit=True, **CHECK)
    assert (found.num_tests, found.num_passed) == (2, 1), "what ended it counts as one"


def test_program_that_dies_in_a_check_ends_it() -> None:
    program = "def f(x):\n    if x == 1: die()\n    return x\n"
    found = judged(program, CHECKING, partial_credit=True, **CHECK)
    assert (found.num_passed, found.failures) == (1, ["it ended early (exit status 0)"])
    late = judged(ProgramHere(program, num_starts=0), CHECKING, partial_credit=True, **CHECK)
    assert (late.num_tests, late.num_passed, late.failures) == (2, 0, [TIME_IS_OVER])


def test_assert_that_gives_a_value_to_a_name_is_left_as_it_is() -> None:
    check = "def check(candidate):\n    assert (y := candidate(1)) == 1\n    assert y == 1\n"
    found = judged("def f(x): return x\n", check, partial_credit=True, **CHECK)
    assert not found.failures
    assert found.num_tests == 2


PROMPT = 'def helper(x):\n    return x\n\n\ndef f(x):\n    """Doc."""\n'
HELPED = {"is_check_function": True, "entry_point": "f", "prompt": PROMPT}
HELPED_CHECK = "def check(candidate):\n    assert candidate(1) == helper(1)\n"


@pytest.mark.parametrize("partial_credit", [False, True])
def test_program_must_pass_with_the_prompts_helpers_and_with_its_own(partial_credit: bool) -> None:
    def holds(helper: int, result: int) -> bool:
        program = f"def helper(x): return {helper}\ndef f(x): return {result}\n"
        return passes(program, HELPED_CHECK, partial_credit=partial_credit, **HELPED)

    assert holds(1, 1)
    assert not holds(2, 2), "the prompt's helper says otherwise"
    assert not holds(2, 1), "its own helper says otherwise"
    assert passes("def f(x): return x\n", HELPED_CHECK, **HELPED), "without its own, the prompt's alone"


def test_tests_that_use_no_helper_are_run_once() -> None:
    source = ProgramHere("def f(x): return x\n")
    found = judged(source, "def check(candidate):\n    assert candidate(1) == 1\n", **HELPED)
    assert not found.uses_helpers
    assert source.num_starts == 1


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("f = 1\n", "def f(x): return x\nassert f(2) == 2"),  # its own name
        ("from math import sqrt\ndef f(x): return sqrt(x)\n", "assert sqrt(4) == f(4)"),
        ("import math as m\ndef f(x): return m.pi\n", "assert f(1) == m.pi"),
        ("from collections import Counter as C\ndef f(x): return C(x)\n", "assert f('aab') == C('baa')"),
        ("def f(x): return x\n", "assert len([1]) == f(1)"),
        ("def f(x): return x\nY = 3\n", "assert f(3) == Y"),
        ("def f(x): return {1: [x]}\n", "assert f(3) == {1: [3]}"),
        ("async def f(x): return x\n", "import asyncio\nassert asyncio.run(f(3)) == 3"),
    ],
)
def test_tests_name_what_they_need_as_if_they_stood_below_the_program(program: str, test: str) -> None:
    assert passes(program, test)


@pytest.mark.parametrize(
    "program",
    [
        "sqrt = lambda x: 7\ndef f(x): return 7\n",
        "class math:\n    sqrt = staticmethod(lambda x: 7)\ndef f(x): return 7\n",
        "def isclose(*a): return True\ndef f(x): return 7\n",
        "def len(x): return 7\ndef f(x): return 7\n",
        "def abs(x): return 0\ndef f(x): return 7\n",
    ],
)
def test_program_cannot_lend_the_tests_a_yardstick_of_its_own(program: str) -> None:
    tests = {
        "sqrt =": "assert f(4) == sqrt(4)", "class math": "assert f(4) == math.sqrt(4)",
        "isclose": "assert isclose(f(1), 2)", "len": "assert f(1) == len([1, 2])", "abs": "assert abs(f(1) - 1) < 1e-6",
    }  # fmt: skip
    (test,) = [test for key, test in tests.items() if key in program.split("\n")[0]]
    assert not passes(program, test)


def test_name_that_nobody_has_fails_the_test() -> None:
    assert why(ADD, "assert nobody(1)") == "test 1: NameError: name 'nobody' is not defined"
    assert why("", "assert sqrt(4) == 2.0").startswith("test 1: NameError"), "not imported by the program either"


def test_built_in_name_is_the_programs_where_the_task_says_so() -> None:
    program = "def sum(a, b): return a * b\n"
    assert passes(program, "assert sum(2, 3) == 6", reference="def sum(a, b): return a * b\n")
    assert passes(program, "assert sum(2, 3) == 6", entry_point="sum")
    assert passes(program, "assert sum(2, 3) == 6"), "nothing else of the program is named"
    assert not passes(program + ADD, "assert sum([add(2, 3)]) == 15")
    assert not passes(program, "assert sum(2, 3) == 6", reference="def other(): pass\n")


def test_name_that_tests_make_themselves_is_theirs_everywhere() -> None:
    program = "def sum(x): return 7\ndef f(x): return x\n"
    assert passes(program, "def sum(x): return 1\nassert sum([5]) == f(1)")
    assert not passes(program, "def sqrt(x): return x\nassert sqrt(f(1)) == 2")


def test_module_name_in_use_as_a_module_means_the_module() -> None:
    program = "def math(x): return 7\ndef f(x): return x\n"
    assert passes(program, "assert math.floor(f(1.5)) == 1")
    assert passes("class math:\n    tau = 1\n", "assert math.tau == 1", reference="class math: pass\n"), (
        "unless the reference defines it"
    )


def test_what_the_reference_imports_is_the_judges_own() -> None:
    program = "def floor(x): return 7\ndef f(x): return x\n"
    assert passes(program, "assert floor(f(1.5)) == 1", reference="from math import floor\ndef f(x): pass\n")
    assert passes(
        program, "assert down(f(1.5)) == 1", reference="from math import floor as down\ndef f(x): pass\n"
    ) is (False), "the program must have the name"
    assert passes(program + "m = 3\n", "assert m.floor(f(1.5)) == 1", reference="import math as m\ndef f(x): pass\n")


def test_module_that_could_do_harm_is_never_lent() -> None:
    program = "import os, sys\nfrom sys import exit as leave\nfrom os import getcwd\ndef f(x): return x\n"
    for test in ("assert os.getpid()", "assert getcwd() == f(1)"):
        source = ProgramHere(program)
        judged(source, test)
        assert any("'resolve','" in question for question in source.questions)
    assert passes(program, "assert sys.maxsize == f(sys.maxsize)"), "sys itself is lent, its functions are not"


def test_names_of_a_reference_are_its_functions_classes_and_plain_imports() -> None:
    code = "import math, os, json as j\nfrom collections import deque as d, nothing\nfrom . import x\nclass A: pass\n"
    functions, classes, library = names_of_reference(code + "def f(): pass\nasync def g(): pass\ny = 1\n")
    assert functions == {"A", "f", "g"}
    assert classes == {"A"}
    assert set(library) == {"math", "j", "d"}
    assert library["j"] is json
    assert names_of_reference("def (") == (frozenset(), frozenset(), {})
    assert names_of_reference("from .math import pi")[2] == {}


def test_prompt_lends_its_helpers_but_not_the_tested_function() -> None:
    hints = make_hints("f", "", PROMPT)
    assert set(hints.trusted) == {"helper"}
    assert hints.trusted["helper"](3) == 3
    unfinished = make_hints("f", "", "def helper(x):\n    return x\ndef f(x):\n")
    assert set(unfinished.trusted) == {"helper"}
    assert set(make_hints("f", "", "x = 1\n1 / 0\ny = 2").trusted) == {"x"}
    assert make_hints("f", "", "def (").trusted == {}
    assert make_hints("", "", "") == Hints()


@pytest.mark.parametrize(
    ("source", "needed", "made"),
    [
        ("assert f(x) == 1", {"f", "x"}, set()),
        ("x = 1\nassert f(x)", {"f"}, {"x"}),
        ("import a.b\nfrom c import d as e\nassert a.b.f(e)", set(), {"a", "e"}),
        ("def g(y):\n    z = y\n    return h(z)\nassert g(1)", {"h"}, {"g"}),
        ("[f(i) for i in r]", {"f", "r"}, set()),
        ("def g():\n    global w\n    return w", {"w"}, {"g"}),
    ],
)
def test_needed_names_are_those_read_from_outside(source: str, needed: set[str], made: set[str]) -> None:
    assert needed_names(source) == needed
    assert made_names(source) == made


# ---------------------------------------------------------------- tolerance


@pytest.mark.parametrize(
    ("left", "right", "is_close"),
    [
        (1.0, 1.05, True), (1.0, 1.25, False), (0.0, 0.1, True), (100.0, 109.0, True), (100.0, 111.0, False),
        (1, 1.05, True), (1, 2, False), (True, 1.05, False),
        (float("inf"), float("inf"), True), (float("inf"), 1e308, False),
        (float("nan"), float("nan"), False), ([1.0, [2.0]], [1.05, [2.05]], True), ([1.0], (1.05,), False),
        ([1.0], [1.0, 2.0], False), ((1.0, 5.0), (1.05, 7.0), False), ({"a": 1.0}, {"a": 1.05}, True),
        ({"a": 1.0}, {"b": 1.0}, False), ({"a": 1.0}, {"a": 2.0}, False),
        ("a", "b", False), ("a", "a", True),
        (-1.0, -1.05, True), (0.001, 0.05, True), (2.0, 2.19, True), (2.0, 2.25, False),
    ],
)  # fmt: skip
def test_floats_are_close_up_to_the_tolerance_relative_beyond_one(left: Any, right: Any, is_close: bool) -> None:
    assert are_close(left, right, 0.1) is is_close
    assert are_close(right, left, 0.1) is is_close


def test_tolerance_holds_for_single_equalities_of_tests_alone() -> None:
    program = "def f(x): return x + 1e-9\n"
    assert not passes(program, "assert f(1) == 1")
    assert passes(program, "assert f(1) == 1", float_tolerance=1e-6)
    assert not passes(program, "assert f(1) != 1", float_tolerance=1e-6)
    assert not passes(program, "assert f(1) <= 1", float_tolerance=1e-6)
    assert not passes(program, "assert 1 == f(1) == 1", float_tolerance=1e-6)
    assert passes(program, "assert [f(1), (f(2),)] == [1, (2,)] and not f(1) == 2", float_tolerance=1e-6)


def test_findings_keep_the_first_failures_only() -> None:
    findings = Findings()
    for number in range(6):
        findings.add_failure(number, f"why {number}")
    assert findings.failures == ["why 0", "test 1: why 1", "test 2: why 2"]
