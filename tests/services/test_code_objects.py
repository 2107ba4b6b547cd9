"""Claims about a program's objects, with the program in this process: what they may decide, what is believed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from program_here import ProgramHere, judged

from services.reward.judging.problem import Unjudgeable
from services.reward.judging.program import MAX_CALLBACKS, Program, ProgramOver, exception_like
from services.reward.judging.remote import MAX_ITEMS, Refused, World


def passes(program: str, *tests: str, **more: Any) -> bool:
    found = judged(program, *tests, **more)
    assert found.num_tests >= 1
    assert (found.num_passed == found.num_tests) == (not found.failures)
    return not found.failures


def why(program: str, *tests: str, **more: Any) -> str:
    """The first failure."""
    return judged(program, *tests, **more).failures[0]


# ---------------------------------------------------------------- objects of the program

POINT = (
    "class V:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
    "    def __ne__(self, o): return self.x != o.x\n    def __lt__(self, o): return self.x < o.x\n"
    "    def __add__(self, o): return V(self.x + (o.x if isinstance(o, V) else o))\n"
    "    def __radd__(self, o): return V(o - self.x)\n    def __contains__(self, o): return o.x < self.x\n"
    "    def __bool__(self): return self.x > 0\n    def __len__(self): return self.x\n"
    "    def __getitem__(self, i): return self.x * i\n    def __setitem__(self, i, v): self.x = (i, v)\n"
    "    def __delitem__(self, i): self.x = i\n    def __iter__(self): return iter(range(self.x))\n"
    "    def __str__(self): return f's{self.x}'\n    def __repr__(self): return f'r{self.x}'\n"
    "    def __int__(self): return self.x\n    def __float__(self): return self.x / 2\n"
    "    def __index__(self): return self.x\n    def __abs__(self): return abs(self.x)\n"
    "    def __neg__(self): return V(-self.x)\n    def __round__(self, n=None): return [self.x, n]\n"
    "    def __hash__(self): return 1\n    def me(self): return self\n"
    "class Sub(V): pass\n"
    "def make(x): return V(x)\n"
)


@pytest.mark.parametrize(
    "test",
    [
        "assert make(3).x == 3", "v = make(3)\nv.x = 4\nassert v.x == 4", "assert make(3)[2] == 6",
        "v = make(3)\nv[1] = 5\nassert v.x == (1, 5)", "v = make(3)\ndel v[7]\nassert v.x == 7",
        "assert list(make(3)) == [0, 1, 2]", "assert make(3)", "assert not make(0)", "assert len(make(3)) == 3",
        "assert str(make(3)) == 's3'", "assert repr(make(3)) == 'r3'", "assert int(make(3)) == 3",
        "assert float(make(3)) == 1.5", "assert [5, 6][make(1)] == 6", "assert abs(make(-3)) == 3",
        "assert (-make(3)).x == -3", "assert round(make(3)) == [3, None]", "assert round(make(3), 1) == [3, 1]",
        "v = make(3)\nassert v == v and not v != v", "v = make(3)\nassert v.me() is v", "assert V.__name__ == 'V'",
        "v = make(1)\nassert {v: 2}[v] == 2", "assert 1 in make(3) and 7 not in make(3)",
        "assert callable(V) and V(3).x == 3", "assert make(1) != make(1)", "assert make(x=2).x == 2",
    ],
)  # fmt: skip
def test_objects_of_the_program_may_be_read_as_they_are(test: str) -> None:
    found = judged(POINT, test)
    assert (found.failures, found.weaker) == ([], set())


@pytest.mark.parametrize(
    "test",
    [
        "assert V(1) == V(1)", "assert not V(1) == V(2)", "assert V(1) != V(2)", "assert not V(1) != V(1)",
        "assert V(1) < V(2) and not V(2) < V(1)", "assert (V(1) + V(2)).x == 3", "assert (V(1) + 5).x == 6",
        "assert (5 + V(1)).x == 4", "assert V(1) in V(3)", "assert not V(3) in V(1)", "assert isinstance(V(1), V)",
        "assert not isinstance(V(1), Sub)", "assert V(1) + V(2) == V(3)", "assert V(1) == make(1)",
        "v = V(1)\nv += V(3)\nassert v.x == 4",
    ],
)  # fmt: skip
def test_objects_that_a_test_made_from_a_class_may_decide_and_the_verdict_says_so(test: str) -> None:
    found = judged(POINT, test)
    assert found.failures == []
    assert "V" in found.weaker


@pytest.mark.parametrize(
    "test",
    [
        "assert make(1) == make(1)", "assert make(1) == 1", "assert make(1) < make(2)", "assert (make(1) + 1).x == 2",
        "assert make(1) in make(3)", "assert isinstance(make(1), V)", "assert 1 + make(1)", "assert 0 in [make(0)]",
    ],
)  # fmt: skip
def test_objects_that_no_test_made_decide_nothing(test: str) -> None:
    found = judged(POINT, test)
    assert len(found.failures) == 1
    assert found.weaker == set()


def test_refused_decision_says_whose_type_it_was() -> None:
    assert why(POINT, "assert make(1) < make(2)") == (
        "test 1: Refused: an object of type V, which the program defines, must not determine the result of a test"
    )


def test_entry_point_and_lower_case_functions_are_no_classes() -> None:
    """What they return was made by the program, though a test called them."""
    program = POINT.replace("def make", "def Make")
    assert passes(program, "assert Make(1) == Make(1)"), "by its name it is a class"
    assert not passes(program, "assert Make(1) == Make(1)", entry_point="Make")
    assert not passes(program, "assert Make(1) == Make(1)", reference="class V: pass\ndef Make(x): pass\n")
    lower = POINT.replace("V", "v_")
    assert not passes(lower, "assert v_(1) == v_(1)")
    assert passes(lower, "assert v_(1) == v_(1)", reference="class v_: pass\n")


@pytest.mark.parametrize(
    ("convert", "answer"),
    [(len, b"true"), (int, b"true"), (float, b"1"), (str, b"3"), (repr, b"null"), (operator.index, b"2.0")],
)
def test_conversion_that_a_program_answers_with_another_type_is_an_error(convert: Any, answer: bytes) -> None:
    program = Program(Scripted(b'{"answer":null}', b'{"answer":' + answer + b"}"))
    stand_in = World(program).make(0, "object", "V")
    program.load()
    with pytest.raises(TypeError, match=r"expected a value of type \w+, got \w+"):
        convert(stand_in)


def test_private_names_of_an_object_are_not_there() -> None:
    program = "class V: __secret__ = 1\ndef f(): return V()\n"
    assert why(program, "assert f().__secret__") == "test 1: AttributeError: __secret__"
    assert passes(program, "assert f().__class__.__name__ == 'RemoteObject'"), "its own, not the program's"
    assert passes("def f():\n    'Doc.'\n", "assert f.__doc__ == 'Doc.'")


def test_exception_of_the_program_is_caught_by_the_name_the_program_gave_it() -> None:
    program = (
        "class Odd(Exception): pass\nclass Deep(ValueError): pass\n"
        "def f(x):\n    raise {0: Odd, 1: Deep, 2: KeyError, 3: OSError}[x]('why')\n"
    )
    catches = "try:\n    f({})\n    assert False\nexcept {} as error:\n    assert 'why' in str(error)"
    for number, name in (
        (0, "Odd"),
        (1, "Deep"),
        (1, "ValueError"),
        (2, "KeyError"),
        (2, "LookupError"),
        (3, "OSError"),
    ):
        assert passes(program, catches.format(number, name)), name
    assert not passes(program, catches.format(0, "ValueError"))
    assert not passes(program, catches.format(1, "Odd"))


def test_iterators_of_the_program_are_read_in_batches_and_no_further_than_needed() -> None:
    program = (
        "asked = []\ndef f(n):\n    for i in range(n):\n        asked.append(i)\n        yield i\n"
        "def num_asked(): return len(asked)\n"
    )
    assert passes(program, "assert list(f(1000)) == list(range(1000))")
    assert passes(program, "assert next(f(10**9)) == 0\nassert num_asked() == 1")
    assert passes(program, "for x in f(10**9):\n    break\nassert num_asked() == 1, num_asked()")
    assert passes(
        program, "it = f(3)\nassert [next(it), next(it), next(it)] == [0, 1, 2]\nassert next(it, None) is None"
    )
    assert passes(program, "assert list(zip(f(3), f(3))) == [(0, 0), (1, 1), (2, 2)]")


def test_endless_iterator_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.reward.judging.remote.MAX_ITEMS", 1000)
    program = "def f():\n    i = 0\n    while True:\n        i += 1\n        yield i\n"
    assert why(program, "assert sum(f()) == 1") == (
        "test 1: Refused: an iterator of the program yields more than 1000 items"
    )
    assert MAX_ITEMS == 1_000_000
    assert issubclass(Refused, TypeError)


def test_function_that_changes_its_arguments_changes_the_tests_own() -> None:
    program = (
        "def f(x):\n    x.append(1)\ndef g(d, s, b):\n    d.clear()\n    d['k'] = 2\n    s.add(3)\n    b.extend(b'x')\n"
        "def h(x):\n    x.append(1)\n    return x\ndef k(x):\n    x = x + [1]\n"
    )
    assert passes(program, "x = [0]\nf(x)\nassert x == [0, 1]")
    assert passes(
        program, "d, s, b = {1: 1}, {1}, bytearray(b'a')\ng(d, s, b)\nassert (d, s, b) == ({'k': 2}, {1, 3}, b'ax')"
    )
    assert passes(program, "x = [0]\nassert h(x) == [0, 1]"), "one with a result gives its own"
    assert passes(program, "x = [0]\nk(x)\nassert x == [0]")


# ---------------------------------------------------------------- callbacks


@pytest.mark.parametrize(
    "test",
    [
        "assert f(lambda x: x + 1, 2) == 3", "def g(x): return x * 2\nassert f(g, 2) == 4", "assert f(len, [1]) == 1",
        "assert f([5, 6].index, 6) == 1", "assert f(str.upper, 'a') == 'A'",
        "import math\nassert f(math.sqrt, 4) == 2.0",
        "class M:\n    def g(self, x): return x + 7\nassert f(M().g, 1) == 8",
    ],
)  # fmt: skip
def test_program_may_call_functions_of_the_tests(test: str) -> None:
    assert passes("def f(g, x): return g(x)\n", test)


def test_error_of_a_tests_function_is_raised_in_the_program() -> None:
    program = (
        "def f(g):\n    try:\n        return g(1)\n    except ZeroDivisionError as error:\n        return str(error)\n"
    )
    assert passes(program, "def g(x): return x / 0\nassert f(g) == 'division by zero'")


@pytest.mark.parametrize("given", ["eval", "open", "__import__"])
def test_dangerous_built_in_runs_where_the_program_is(given: str) -> None:
    source = ProgramHere("def f(g): return g.__name__\n")
    found = judged(source, f"assert f({given}) == {given!r}")
    assert not found.failures
    assert any(f"B({given!r})" in question for question in source.questions), "by name, not as a way back here"


def test_function_of_another_module_is_not_handed_over() -> None:
    with pytest.raises(Unjudgeable, match="function"):
        judged("def f(g): return g()\n", "import os.path\nassert f(os.path.join)")


# ---------------------------------------------------------------- what a program may answer


class Scripted:
    """A source whose answers are given."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []

    def open_program(self) -> bytes:
        return self.answers.pop(0)

    def ask_program(self, request: bytes) -> bytes:
        self.asked.append(request)
        return self.answers.pop(0)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"3", b"[]", b"{}", b'{"other":1}', b'{"raised":1}', b'{"raised":["a","b"]}', b'{"raised":["a","b",3]}',
        b'{"raised":{"tuple":["a","b","c"]}}',
        b'{"callback":0,"args":{"tuple":[]},"kwargs":{"dict":[]}}',
        b'{"callback":-1,"args":{"tuple":[]},"kwargs":{"dict":[]}}',
        b'{"callback":true,"args":{"tuple":[]},"kwargs":{"dict":[]}}', b'{"callback":0}',
    ],
)  # fmt: skip
def test_answer_that_is_none_ends_the_program(answer: bytes) -> None:
    program = Program(Scripted(b'{"answer":null}', answer))
    program.load()
    with pytest.raises(ProgramOver, match="it broke the protocol of the tests"):
        program.ask("resolve", "f")
    assert program.over == "it broke the protocol of the tests"
    with pytest.raises(ProgramOver):
        program.ask("resolve", "f")
    assert len(program._source.asked) == 1, "nothing more is asked"  # type: ignore[attr-defined]


def test_program_may_call_back_only_with_arguments_of_the_right_kind() -> None:
    calls: list[Any] = []
    for args, kwargs in (
        (b'{"tuple":[1]}', b'{"dict":[["k",2]]}'),
        (b"[1]", b'{"dict":[]}'),
        (b'{"tuple":[1]}', b"[]"),
    ):
        back = b'{"callback":0,"args":' + args + b',"kwargs":' + kwargs + b"}"
        source = Scripted(b'{"answer":null}', back, b'{"answer":5}')
        program = Program(source)
        program.load()

        def note(*args: Any, **kwargs: Any) -> int:
            calls.append((args, kwargs))
            return 9

        note.__module__ = "tests"
        if b"tuple" in args and b"dict" in kwargs:
            assert program.ask("call", "f", (note,), {}) == 5
            assert source.asked[1] == b"('return',9)"
        else:
            with pytest.raises(ProgramOver):
                program.ask("call", "f", (note,), {})
    assert calls == [((1,), {"k": 2})]


def test_program_that_calls_back_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CALLBACKS >= 1000
    monkeypatch.setattr("services.reward.judging.program.MAX_CALLBACKS", 3)
    back = b'{"callback":0,"args":{"tuple":[]},"kwargs":{"dict":[]}}'

    def nothing() -> None: ...

    nothing.__module__ = "tests"
    for number, fits in ((2, True), (3, False)):
        program = Program(Scripted(b'{"answer":null}', *[back] * number, b'{"answer":5}'))
        program.load()
        if fits:
            assert program.ask("call", "f", (nothing,), {}) == 5
        else:
            with pytest.raises(ProgramOver):
                program.ask("call", "f", (nothing,), {})


@pytest.mark.parametrize(
    "changed", [b"null", b"[[1]]", b'{"tuple":[]}', b'{"tuple":[[1],[2]]}', b'{"tuple":[{"tuple":[1]}]}']
)
def test_changes_that_do_not_fit_the_arguments_are_left_out(changed: bytes) -> None:
    program = Program(Scripted(b'{"answer":null}', b'{"answer":null,"args":' + changed + b"}"))
    program.load()
    given = [0]
    program.ask("call", "f", (given,), {})
    assert given == [0]


def test_exceptions_are_of_built_in_types_by_name_and_of_no_other() -> None:
    for base, kind in (
        ("KeyError", KeyError), ("UnicodeDecodeError", ValueError), ("SystemExit", Exception), ("len", Exception),
        ("nothing", Exception), ("KeyboardInterrupt", Exception),
    ):  # fmt: skip
        made = exception_like("Odd", base, "why", None)
        assert isinstance(made, kind)
        assert isinstance(made, Exception)
        assert type(made).__name__ == "Odd"
        assert "why" in str(made)
    assert type(exception_like("not a name", "ValueError", "why", None)).__name__ == "Exception"

    class Mine(Exception): ...

    assert isinstance(exception_like("Mine", "ValueError", "why", Mine), Mine)

    class Picky(Exception):
        def __init__(self) -> None: ...

    made = exception_like("Picky", "Exception", "why", Picky)
    assert str(made) == "Picky: why"


def test_handle_is_one_object_however_often_it_comes() -> None:
    world = World(Program(Scripted()))
    assert world.make(1, "object", "V") is world.make(1, "object", "V")
    assert world.make(1, "object", "V") is not world.make(2, "object", "V")
