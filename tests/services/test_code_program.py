"""Claims about a program as its tests see it: what is asked, what may be called back, which answers are believed."""

from __future__ import annotations

import collections
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from services.reward.judging import program as module
from services.reward.judging.plain import NotPlain, Untagged
from services.reward.judging.program import (
    BROKE_PROTOCOL,
    TESTS,
    Program,
    ProgramOver,
    Raised,
    exception_like,
    may_call_back,
)


class Source:
    """Answers from a script; remembers what it was asked."""

    def __init__(self, *script: Any) -> None:
        self.script = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in script]
        self.asked: list[str] = []

    def open_program(self) -> bytes:
        return self.script.pop(0)

    def ask_program(self, request: bytes) -> bytes:
        self.asked.append(request.decode("utf-8", "surrogatepass"))
        if not self.script:
            raise ProgramOver("it ended early")
        return self.script.pop(0)


def program_of(*script: Any) -> tuple[Program, Source]:
    source = Source({"answer": None}, *script)
    program = Program(source)
    program.load()
    return program, source


def of_tests(function: Callable[..., Any]) -> Callable[..., Any]:
    """As if a test had defined it."""
    function.__module__ = TESTS
    return function


def test_request_is_an_expression_and_its_answer_plain_data() -> None:
    program, source = program_of({"answer": {"tuple": [1, 2]}})
    assert program.ask("get", "\ud800", [1]) == (1, 2)
    assert source.asked == ["('get','\\ud800',[1],)"]
    assert program.over == ""


def test_program_that_is_over_is_asked_no_more_and_says_why_again() -> None:
    program, source = program_of()
    for _ in range(2):
        with pytest.raises(ProgramOver, match="it ended early"):
            program.ask("get", "x")
    assert len(source.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"no JSON", {"more": 1}, {"callback": 0}, {"callback": True, "args": {"tuple": []}, "kwargs": {"dict": []}},
        {"callback": 0, "args": {"tuple": []}, "kwargs": {"dict": []}}, {"raised": ["E", "E"]},
        {"raised": ["E", "E", 1]},
        {"raised": {"tuple": ["E", "E", "x"]}}, {"raised": "EEE"},
    ],
)  # fmt: skip
def test_answer_of_another_form_ends_the_program(answer: Any) -> None:
    program, _ = program_of(answer)
    with pytest.raises(ProgramOver, match=BROKE_PROTOCOL):
        program.ask("get", "x")
    assert program.over == BROKE_PROTOCOL
    starting = Program(Source(answer))
    with pytest.raises(ProgramOver, match=BROKE_PROTOCOL):
        starting.load()


def test_program_raises_here_what_it_raised_there() -> None:
    class Own(Exception): ...

    program, _ = program_of({"raised": ["KeyError", "KeyError", "k"]}, {"raised": ["Own", "Exception", "o"]})
    with pytest.raises(KeyError) as raised:
        program.ask("get", "x")
    assert isinstance(raised.value, Raised)
    program.exceptions["Own"] = Own
    with pytest.raises(Own, match="o"):
        program.ask("get", "x")
    with pytest.raises(SyntaxError):
        Program(Source({"raised": ["SyntaxError", "SyntaxError", "bad"]})).load()


# ---------------------------------------------------------------- callbacks


def called(number: Any, *args: Any, kwargs: Any = ()) -> dict[str, Any]:
    return {"callback": number, "args": {"tuple": list(args)}, "kwargs": {"dict": list(kwargs)}}


def test_function_of_a_test_is_called_here_and_its_result_goes_back() -> None:
    @of_tests
    def first(a: int, b: int = 0) -> int:
        return a * 10 + b

    @of_tests
    def second() -> None:
        raise ValueError("x" * 300)

    program, source = program_of(
        called(0, 3, kwargs=[["b", 4]]), called(1), {"answer": 7},
    )  # fmt: skip
    assert program.ask("do", [first, second]) == 7
    assert source.asked == ["('do',[C(0),C(1)],)", "('return',34)", f"('raise',('ValueError',{'x' * 200!r}))"]


@pytest.mark.parametrize(
    "message",
    [
        called(-1), called(1), called("0"), called(False), {**called(0), "args": [1]}, {**called(0), "kwargs": None},
        {"callback": 0},
    ],
)  # fmt: skip
def test_call_of_what_was_not_handed_over_ends_the_program(message: Any) -> None:
    num_calls = 0

    @of_tests
    def function(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    program, _ = program_of(message)
    with pytest.raises(ProgramOver, match=BROKE_PROTOCOL):
        program.ask("do", function)
    assert num_calls == 0


def test_calls_of_one_exchange_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLBACKS", 3)
    function = of_tests(lambda: None)
    program, source = program_of(called(0), called(0), {"answer": 1})
    assert program.ask("do", function) == 1
    program, source = program_of(called(0), called(0), called(0), {"answer": 1})
    with pytest.raises(ProgramOver, match=BROKE_PROTOCOL):
        program.ask("do", function)
    assert len(source.asked) == 1 + 3


@pytest.mark.parametrize(
    ("value", "may"),
    [
        (of_tests(lambda: None), True), (lambda: None, False), (collections.namedtuple, True), (json.dumps, True),
        (pytest.fail, False),
        ([].append, True), ("".join, True), (math.sqrt, True), (random.random, True), (str.upper, True), (open, False),
        (int.__add__, True), (exec, False), (len, False), (int, False), (3, False),
    ],
)  # fmt: skip
def test_program_may_call_functions_of_tests_methods_of_data_and_plain_library_code(value: Any, may: bool) -> None:
    assert may_call_back(value) is may


def test_method_of_a_tests_class_may_be_called_and_that_of_another_may_not() -> None:
    class Mine:
        @of_tests
        def of_test(self) -> None: ...

        def of_judge(self) -> None: ...

    assert may_call_back(Mine().of_test)
    assert not may_call_back(Mine().of_judge)


def test_system_is_no_plain_module_to_call_into() -> None:
    import sys

    assert "sys" in module.PLAIN_MODULES
    assert not may_call_back(sys.exit)


# ---------------------------------------------------------------- what is handed over


def test_stand_in_goes_by_its_number_and_what_is_no_data_makes_the_verdict_void() -> None:
    program, source = program_of({"answer": 1})
    thing = object()
    program.number_of = lambda value: 0 if value is thing else None
    program.ask("get", [thing])
    assert source.asked == ["('get',[H(0)],)"]
    assert program.unanswerable == ""
    with pytest.raises(NotPlain):
        program.ask("get", object())
    assert program.unanswerable == ("a test passes an object of type object, which cannot be passed to a sandbox")
    assert program.over == ""


def test_object_without_a_tag_that_a_program_gave_is_never_given_back() -> None:
    program, source = program_of()
    with pytest.raises(ProgramOver, match=BROKE_PROTOCOL):
        program.ask("get", Untagged({"a": 1}))
    assert source.asked == []


def test_call_without_a_result_changes_its_arguments_in_place() -> None:
    arguments: tuple[Any, ...] = ([1], bytearray(b"a"), {"a": 1}, {1}, (1,), [5])
    kept = list(arguments)
    changed = {
        "tuple": [[2, 3], {"bytearray": "6262"}, {"dict": [["b", 2]]}, {"set": [2]}, {"tuple": [2]}, {"tuple": [6]}]
    }
    program, _ = program_of({"answer": None, "args": changed})
    program.ask("call", "f", arguments, {})
    assert arguments == ([2, 3], bytearray(b"bb"), {"b": 2}, {2}, (1,), [5]), "values and other types stay"
    assert all(one is other for one, other in zip(arguments, kept, strict=True))


@pytest.mark.parametrize(
    ("kind", "changed"), [("call", {"tuple": [[2], [3]]}), ("call", [[2]]), ("call", None), ("do", {"tuple": [[2]]})]
)
def test_arguments_change_only_where_as_many_came_back_from_a_call(kind: str, changed: Any) -> None:
    arguments = ([1],)
    program, _ = program_of({"answer": 5, "args": changed})
    assert program.ask(kind, "f", arguments, {}) == 5
    assert arguments == ([1],)


# ---------------------------------------------------------------- exceptions


@pytest.mark.parametrize(
    ("name", "base", "is_a", "called_"),
    [
        ("KeyError", "KeyError", KeyError, "KeyError"), ("Own", "LookupError", LookupError, "Own"),
        ("UnicodeDecodeError", "UnicodeDecodeError", ValueError, "UnicodeDecodeError"),
        ("E", "no_such", Exception, "E"),
        ("E", "len", Exception, "E"), ("E", "int", Exception, "E"), ("E", "SystemExit", Exception, "E"),
        ("not a name", "ValueError", ValueError, "Exception"), ("Own", "Exception", Exception, "Own"),
    ],
)  # fmt: skip
def test_exception_is_of_a_built_in_type_and_never_one_that_ends_the_process(
    name: str, base: str, is_a: type[BaseException], called_: str
) -> None:
    made = exception_like(name, base, "text", None)
    assert isinstance(made, is_a)
    assert isinstance(made, Raised)
    assert isinstance(made, Exception)
    assert not isinstance(made, UnicodeError)
    assert type(made).__name__ == called_
    assert "text" in str(made)


def test_stand_in_of_the_tests_is_what_is_raised_and_one_that_does_not_fit_is_none() -> None:
    class Own(ValueError): ...

    class Wants(Exception):
        def __init__(self, one: int, two: int) -> None: ...

    assert isinstance(exception_like("Own", "ValueError", "x", Own), Own)
    odd = exception_like("Wants", "Exception", "x", Wants)
    assert (type(odd).__name__, str(odd)) == ("Exception", "Wants: x")
    assert isinstance(odd, Raised)
