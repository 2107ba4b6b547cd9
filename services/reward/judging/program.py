"""A program under test, as its tests use it: requests to the program, plain data back, through the judge.

Answers are not trusted: a malformed or unexpected one ends the program. Limits and processes are in exchange.py and
judge.py. Its limits and its process are the judge's (exchange, judge).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from services.reward.judging.plain import Forged, NotPlain, Untagged, expression_of, read_answer
from services.reward.sandbox.inside_answering import PLAIN_MODULES

MAX_CALLBACKS = 10_000
"""Largest number of calls of a test's function by a program in one exchange."""
TESTS = "tests"
"""Name of modules created from a task's own code."""
BROKE_PROTOCOL = "it broke the protocol of the tests"


class ProgramOver(BaseException):
    """The program ended, was stopped, or broke the protocol. Not an Exception, so that a test's own `except` does not
    hide it."""


class LateProgram(Exception):
    """No program is started any more: the time for all its tests has passed."""


class ProgramSource(Protocol):
    """Starts processes of the program (tests_process.Judge)."""

    def open_program(self) -> bytes:
        """End the current process and start a new one; returns its first message. Raises ProgramOver, LateProgram."""

    def ask_program(self, request: bytes) -> bytes:
        """Send one request and return the reply. Raises ProgramOver."""


class Raised:
    """Mixed into exceptions that are raised here because the program raised them."""


class Program:
    """One process of a program whose functions are called. `load`, then `ask`."""

    def __init__(self, source: ProgramSource) -> None:
        self.over = ""
        """Why no more requests can be sent; empty while it runs."""
        self.make_handle: Callable[[int, str, str], Any] = lambda number, what, name: None
        self.number_of: Callable[[Any], int | None] = lambda value: None
        self.unanswerable = ""
        """A test passed an object that cannot be sent to a program, so its verdict is void."""
        self.exceptions: dict[str, type[BaseException]] = {}
        """Local stand-ins for the program's own exception types, by name."""
        self._source = source
        self._callbacks: list[Callable[..., Any]] = []

    def load(self) -> None:
        """Start it and run its top level. Raises ProgramOver, LateProgram, or the program's exception."""
        self._settle(self._read(self._source.open_program))

    def ask(self, kind: str, *operands: Any) -> Any:
        """Send one request and return its result. Raises ProgramOver, NotPlain, or the program's exception."""
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
            f"a test passes an object of type {type(value).__name__}, which cannot be passed to a sandbox"
        )
        raise NotPlain(self.unanswerable)

    def _settle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Serve callbacks until there is a result."""
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
    """Whether a program may call this object here, with any arguments: functions of the tests, methods of data, plain
    library code.

    Built-in functions are not callbacks: the program uses its own (a test may pass `len`, but also `eval`).
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
    """Apply to a test's arguments the changes that a function without a result made to its copies."""
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
    """An exception for one of the program: of a built-in type by name, of the program's own type by its stand-in."""
    base = getattr(__import__("builtins"), base_name, Exception)
    if not isinstance(base, type) or not issubclass(base, Exception) or issubclass(base, UnicodeError):
        base = ValueError if isinstance(base, type) and issubclass(base, UnicodeError) else Exception
    bases: list[type] = list(dict.fromkeys((Raised, stand_in or base, base)))
    try:
        made: Any = type(name if name.isidentifier() else "Exception", tuple(bases), {})(text)
    except TypeError:  # the bases have no common order, or a base takes other arguments
        made = type("Exception", (Raised, Exception), {})(f"{name}: {text}")
    assert isinstance(made, BaseException)
    return made
