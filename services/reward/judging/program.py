"""A program under test, as its tests see it: questions out, plain data back, by way of the judge.

Owns: what the messages of a program mean, handles and callbacks. Refuses: believing anything: an answer that is
malformed or unasked for ends the program. Its limits and its process are the judge's (exchange, judge).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from services.reward.judging.plain import Forged, NotPlain, Untagged, expression_of, read_answer
from services.reward.sandbox.inside_answering import PLAIN_MODULES

MAX_CALLBACKS = 10_000
"""Calls of a test's function by a program, in one exchange."""
TESTS = "tests"
"""What modules made of a task's own code are called."""
BROKE_PROTOCOL = "it broke the protocol of the tests"


class ProgramOver(BaseException):
    """The program ended, was stopped, or broke the protocol. No Exception: a test's own `except` must not hide it."""


class LateProgram(Exception):
    """No program is started any more: the time for all its tests is over."""


class ProgramSource(Protocol):
    """Where processes of the program come from (tests_process.Judge)."""

    def open_program(self) -> bytes:
        """End the present process and start a new one: its first message. Raises ProgramOver, LateProgram."""

    def ask_program(self, request: bytes) -> bytes:
        """One request and the message that comes back. Raises ProgramOver."""


class Raised:
    """Mixed into what is raised here because the program raised it there."""


class Program:
    """One process of a program whose functions are called. `load`, then `ask`."""

    def __init__(self, source: ProgramSource) -> None:
        self.over = ""
        """Why no more can be asked; empty while it lives."""
        self.make_handle: Callable[[int, str, str], Any] = lambda number, what, name: None
        self.number_of: Callable[[Any], int | None] = lambda value: None
        self.unanswerable = ""
        """A test handed over what no program can be given; its verdict is void."""
        self.exceptions: dict[str, type[BaseException]] = {}
        """Local stand-ins for the program's own exception types, by name."""
        self._source = source
        self._callbacks: list[Callable[..., Any]] = []

    def load(self) -> None:
        """Start it and run its top level. Raises ProgramOver, LateProgram, or what the program raises."""
        self._settle(self._read(self._source.open_program))

    def ask(self, kind: str, *operands: Any) -> Any:
        """One request and its answer. Raises ProgramOver, NotPlain, or what the program raises."""
        if self.over:
            raise ProgramOver(self.over)
        request = "(" + ",".join([repr(kind), *(self._write(operand) for operand in operands)]) + ",)"
        answer = self._settle(self._exchange(request))
        if kind == "call" and answer.get("args") is not None:
            _change_in_place(operands[1], answer["args"])
        return answer["answer"]

    def _write(self, value: Any) -> str:
        return expression_of(value, self._refer)

    def _refer(self, value: Any) -> str:
        number = self.number_of(value)
        if number is not None:
            return f"H({number})"
        if isinstance(value, Untagged):
            self._end(BROKE_PROTOCOL)
        if may_call_back(value):
            self._callbacks.append(value)
            return f"C({len(self._callbacks) - 1})"
        self.unanswerable = (
            f"a test hands over an object of type {type(value).__name__}, which cannot be passed to a sandbox"
        )
        raise NotPlain(self.unanswerable)

    def _settle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Serve callbacks until there is an answer."""
        for _ in range(MAX_CALLBACKS):
            if "answer" in message:
                return message
            if "raised" in message:
                raise self._exception(message["raised"])
            if "callback" not in message:
                break
            message = self._exchange(self._call_back(message))
        self._end(BROKE_PROTOCOL)

    def _call_back(self, message: dict[str, Any]) -> str:
        number: Any = message["callback"]
        args: Any = message.get("args")
        kwargs: Any = message.get("kwargs")
        is_call = type(number) is int and type(args) is tuple and type(kwargs) is dict
        if not is_call or not 0 <= number < len(self._callbacks):
            self._end(BROKE_PROTOCOL)
        try:
            return f"('return',{self._write(self._callbacks[number](*args, **kwargs))})"
        except Exception as error:  # a test's function may raise anything; the program receives it
            return f"('raise',({type(error).__name__!r},{str(error)[:200]!r}))"

    def _exception(self, fields: Any) -> BaseException:
        if type(fields) is not list or len(fields) != 3 or not all(type(word) is str for word in fields):
            self._end(BROKE_PROTOCOL)
        name, base_name, text = fields
        return exception_like(name, base_name, text, self.exceptions.get(name))

    def _exchange(self, text: str) -> dict[str, Any]:
        body = text.encode("utf-8", "surrogatepass")
        return self._read(lambda: self._source.ask_program(body))

    def _read(self, receive: Callable[[], bytes]) -> dict[str, Any]:
        try:
            return read_answer(receive(), self.make_handle)
        except ProgramOver as over:
            self._end(str(over))
        except Forged:
            self._end(BROKE_PROTOCOL)

    def _end(self, why: str) -> NoReturn:
        self.over = why
        raise ProgramOver(why)


def may_call_back(value: Any) -> bool:
    """A program may call this, here, with what it likes: functions of the tests, methods of data, plain library code.

    Built-in functions are no callbacks: the program gets its own (a test may hand over `len`, but also `eval`).
    """
    if isinstance(value, types.MethodType):
        return may_call_back(value.__func__)
    if isinstance(value, types.FunctionType):
        return value.__module__ == TESTS or value.__module__ in PLAIN_MODULES
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        return not isinstance(owner, types.ModuleType) or owner.__name__.lstrip("_") in PLAIN_MODULES - {"sys"}
    return isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType)


def _change_in_place(args: tuple[Any, ...], changed: Any) -> None:
    """Do to a test's arguments what a function without a result did to its copies."""
    if type(changed) is not tuple or len(changed) != len(args):
        return
    for old, new in zip(args, changed, strict=True):
        if type(old) is not type(new):
            continue
        if isinstance(old, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set):
            old.clear()
            old.update(new)


def exception_like(name: str, base_name: str, text: str, stand_in: type[BaseException] | None) -> BaseException:
    """An exception here for one there: of a built-in type by its name, of the program's own type by its stand-in."""
    base = getattr(__import__("builtins"), base_name, Exception)
    if not isinstance(base, type) or not issubclass(base, Exception) or issubclass(base, UnicodeError):
        base = ValueError if isinstance(base, type) and issubclass(base, UnicodeError) else Exception
    bases: list[type] = list(dict.fromkeys((Raised, stand_in or base, base)))
    try:
        made: Any = type(name if name.isidentifier() else "Exception", tuple(bases), {})(text)
    except TypeError:  # no common order of the bases, or a base that wants other arguments
        made = type("Exception", (Raised, Exception), {})(f"{name}: {text}")
    assert isinstance(made, BaseException)
    return made
