"""The inside of a sandbox, third part: a program whose functions are called by tests outside (see inside.py).

It runs a program's top level, then answers requests about its names and objects, one at a time. It does not know the
purpose of a request: no expected result is ever sent in.

Requests are tuples, written as Python expressions: ("resolve", name), ("call", function, args, kwargs), ("get", object,
name), ("set", object, name, value), ("take", iterator, n), ("do", operation, operands). An answer is {"answer": value},
{"answer": null, "args": changed} or {"raised": [type, built-in base, text]}; {"callback": ...} is a request to the
tests.
"""

from __future__ import annotations

import os
import sys
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from services.reward.sandbox.inside_writing import MAX_NAME_CHARS, CannotPass, Writer, tag

MAX_BATCH = 256
_MODULES = """
    bisect calendar cmath collections copy datetime decimal fractions functools heapq itertools json math numbers
    operator random re statistics string sys textwrap typing
"""
PLAIN_MODULES = frozenset(_MODULES.split())
"""Modules that a test may use because the program imported them; the judge then uses its own copy."""
_OPERATORS = """
    lt le gt ge eq ne add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos abs invert getitem
    setitem delitem contains index
"""


def operations() -> dict[str, Callable[..., Any]]:
    """Operations on an object, in addition to calls and attributes."""
    import _operator

    functions = (len, bool, str, repr, int, float, complex, round, iter, next, reversed, hash, format, divmod)
    known: dict[str, Callable[..., Any]] = {name: getattr(_operator, name) for name in _OPERATORS.split()}
    known.update({function.__name__: function for function in (*functions, isinstance, issubclass)})
    return known


class Responder:
    """Answers requests one after the other until the judge closes the connection."""

    def __init__(self, fd: int, names: dict[str, Any]) -> None:
        self.fd, self.names, self.pid = fd, names, os.getpid()
        self.handles: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.callbacks: dict[int, Callable[..., Any]] = {}
        self.request = b""
        self.writer = Writer(self.keep)
        self.operations = operations()
        built_in = vars(sys.modules["builtins"])
        self.exceptions = {
            name: value
            for name, value in built_in.items()
            if isinstance(value, type) and issubclass(value, BaseException)
        }
        self.environment: dict[str, Any] = {
            "__builtins__": {},
            "H": self.handles.__getitem__,
            "C": self.callback,
            "L": self.library_value,
            "B": built_in.copy().__getitem__,
            "nan": float("nan"),
            "inf": float("inf"),
        }
        for kind in (set, frozenset, bytearray, range, complex, int):
            self.environment[kind.__name__] = kind

    def serve(self, source: bytes) -> None:
        """Run the program's top level, then answer."""
        try:
            program = compile(source, "program.py", "exec", 0, True)
            keep_depth(2, 1)
            exec(program, self.names)
            answer = '{"answer":null}'
        except BaseException as error:
            answer = self.raised(error)
        while True:
            if os.getpid() != self.pid:  # a child of the program returned here; it must not talk to the judge
                os._exit(0)
            self.send(answer)
            request = self.receive()
            try:
                answer = self.answer(*request)
            except BaseException as error:
                answer = self.raised(error)

    def answer(self, kind: str, *rest: Any) -> str:
        """The answer to one request, as text."""
        if kind == "call":
            return self.call(*rest)
        if kind == "resolve":
            return tag("answer", self.resolve(rest[0]))
        result = None
        if kind == "get":
            result = getattr(rest[0], rest[1])
        elif kind == "set":
            setattr(rest[0], rest[1], rest[2])
        elif kind == "take":
            result = list(islice(rest[0], min(rest[1], MAX_BATCH)))
        else:
            result = self.operations[rest[0]](*rest[1])
        return tag("answer", self.write(result))

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        request = self.request
        result = function(*args, **kwargs)
        if type(result).__name__ == "coroutine":
            import asyncio

            result = asyncio.run(result)
        answer = tag("answer", self.write(result))
        if result is None and not all(type(value) in self.writer.fixed for value in args):
            changed = self.write(args)  # a function without a result may have changed its arguments
            if changed != self.write(eval(request, self.environment)[2]):
                return f'{{"answer":null,"args":{changed}}}'
        return answer

    def resolve(self, name: str) -> str:
        """The program's value of a name: [kind, value]."""
        if name not in self.names:
            return '["missing",null]'
        value = self.names[name]
        is_module = type(value) is type(sys)
        module = value.__name__ if is_module else getattr(value, "__module__", None)
        if type(module) is str and module.lstrip("_") in PLAIN_MODULES:
            if is_module:
                return f'["module",{self.write(module)}]'
            own_name = getattr(value, "__name__", None)
            if type(own_name) is str and getattr(sys.modules.get(module), own_name, None) is value:
                return f'["library",{self.write([module.lstrip("_"), own_name])}]'
        return f'["{"own" if module == "__main__" else "other"}",{self.write(value)}]'

    def raised(self, error: BaseException) -> str:
        kind = type(error)
        base = next((base.__name__ for base in kind.__mro__ if self.exceptions.get(base.__name__) is base), "Exception")
        try:
            message = str(error)[:MAX_NAME_CHARS]
        except BaseException:
            message = "(its text cannot be shown)"
        return tag("raised", self.write([str(kind.__name__)[:MAX_NAME_CHARS], base, message]))

    def write(self, value: Any) -> str:
        try:
            return self.writer.write(value)
        except (CannotPass, RecursionError):
            return self.writer.handle(value)

    def keep(self, value: Any) -> int:
        """The number of a handle on this object."""
        number = self.numbers.setdefault(id(value), len(self.handles))
        if number == len(self.handles):
            self.handles.append(value)
        return number

    def callback(self, number: int) -> Callable[..., Any]:
        """A function of the tests, to be called by the program."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.send(f'{{"callback":{number},"args":{self.write(args)},"kwargs":{self.write(kwargs)}}}')
            kind, value = self.receive()
            if kind == "raise":
                raise self.exceptions.get(value[0], RuntimeError)(value[1])
            return value

        return self.callbacks.setdefault(number, call)

    def library_value(self, module: str, name: str, *args: Any) -> Any:
        return getattr(__import__(module), name)(*args)

    def send(self, text: str) -> None:
        body = text.encode()
        body = len(body).to_bytes(4, "big") + body
        while body:
            body = body[os.write(self.fd, body) :]

    def receive(self) -> Any:
        size = int.from_bytes(self.exactly(4), "big")
        self.request = self.exactly(size)
        return eval(self.request, self.environment)

    def exactly(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            chunk = os.read(self.fd, min(size - len(content), 1 << 20))
            if not chunk:
                os._exit(0)
            content += chunk
        return bytes(content)


def keep_depth(num_more: int, num_more_since_3_12: int) -> None:
    """Give the program as many levels of recursion as it has as a script.

    Before Python 3.12 calls through C count as levels, too.
    """
    depth, frame = num_more if sys.version_info < (3, 12) else num_more_since_3_12, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)
