"""A program under test, as the judge's side of the sandbox sees it: questions out, plain data back.

Owns: the exchange of messages with a program's process, its limits while the judge waits, handles and callbacks.
Refuses: believing anything: an answer that is too long, malformed or unasked for ends the program.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from services.reward.judging.deadline import Deadline
from services.reward.judging.plain import Forged, NotPlain, Untagged, expression_of, read_answer
from services.reward.sandbox.cell import Cell
from services.reward.sandbox.inside_answering import PLAIN_MODULES
from services.reward.sandbox.layers import Sandbox
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Run, Stopped, words_for

LENGTH_BYTES = 4
MAX_CALLBACKS = 10_000
"""Calls of a test's function by a program, in one exchange."""
CHUNK_BYTES = 1 << 16
TESTS = "tests"
"""What modules made of a task's own code are called."""


class ProgramOver(BaseException):
    """The program ended, was stopped, or broke the protocol. No Exception: a test's own `except` must not hide it."""


class Raised:
    """Mixed into what is raised here because the program raised it there."""


class Program:
    """One process of a program whose functions are called. `load`, then `ask`; afterwards `close`."""

    def __init__(self, sandbox: Sandbox, source: bytes, limits: Limits, deadline: Deadline) -> None:
        """Raises SandboxFailed."""
        self.over = ""
        """Why no more can be asked; empty while it lives."""
        self.make_handle: Callable[[int, str, str], Any] = lambda number, what, name: None
        self.number_of: Callable[[Any], int | None] = lambda value: None
        self.unanswerable = ""
        """A test handed over what no program can be given; its verdict is void."""
        self.exceptions: dict[str, type[BaseException]] = {}
        """Local stand-ins for the program's own exception types, by name."""
        self._limits = limits
        self._callbacks: list[Callable[..., Any]] = []
        self._cell = sandbox.open(source, limits)
        try:
            self._cell.wait_ready()
            deadline.start()
            self._run = Run(self._cell, limits, deadline.until_s)
            self._channel = _open_channel(self._cell)
        except BaseException:
            self._cell.close()
            raise

    def load(self) -> None:
        """Run the program's top level. Raises ProgramOver, or what the program raises."""
        self._settle(self._receive())

    def ask(self, kind: str, *operands: Any) -> Any:
        """One request and its answer. Raises ProgramOver, NotPlain, or what the program raises."""
        if self.over:
            raise ProgramOver(self.over)
        request = "(" + ",".join([repr(kind), *(self._write(operand) for operand in operands)]) + ",)"
        with contextlib.suppress(BlockingIOError):
            if self._channel.recv(1, socket.MSG_PEEK):
                self._end("it answered before it was asked")
        self._send(request)
        answer = self._settle(self._receive())
        if kind == "call" and answer.get("args") is not None:
            _change_in_place(operands[1], answer["args"])
        return answer["answer"]

    def close(self) -> None:
        """End it and everything it started."""
        self._channel.close()
        self._cell.close()

    def _write(self, value: Any) -> str:
        return expression_of(value, self._refer)

    def _refer(self, value: Any) -> str:
        number = self.number_of(value)
        if number is not None:
            return f"H({number})"
        if isinstance(value, Untagged):
            self._end("it broke the protocol of the tests")
        if may_call_back(value):
            self._callbacks.append(value)
            return f"C({len(self._callbacks) - 1})"
        self.unanswerable = f"a test hands over an object of type {type(value).__name__}, which no sandbox can be given"
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
            self._send(self._call_back(message))
            message = self._receive()
        self._end("it broke the protocol of the tests")

    def _call_back(self, message: dict[str, Any]) -> str:
        number: Any = message["callback"]
        args: Any = message.get("args")
        kwargs: Any = message.get("kwargs")
        is_call = type(number) is int and type(args) is tuple and type(kwargs) is dict
        if not is_call or not 0 <= number < len(self._callbacks):
            self._end("it broke the protocol of the tests")
        try:
            return f"('return',{self._write(self._callbacks[number](*args, **kwargs))})"
        except Exception as error:  # a test's function may raise anything; the program is told
            return f"('raise',({type(error).__name__!r},{str(error)[:200]!r}))"

    def _exception(self, told: Any) -> BaseException:
        if type(told) is not list or len(told) != 3 or not all(type(word) is str for word in told):
            self._end("it broke the protocol of the tests")
        name, base_name, text = told
        return exception_like(name, base_name, text, self.exceptions.get(name))

    # ------------------------------------------------------------ the wire

    def _send(self, text: str) -> None:
        body = text.encode("utf-8", "surrogatepass")
        rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
        while rest:
            self._wait(select.POLLOUT)
            try:
                rest = rest[self._channel.send(rest[:CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError:
                self._end("it closed its connection")

    def _receive(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(LENGTH_BYTES), "big")
        if length > self._limits.max_output_bytes:
            self._end(f"its answer is longer than {self._limits.max_output_bytes >> 10} kB")
        try:
            return read_answer(self._exactly(length), self.make_handle)
        except Forged:
            self._end("it broke the protocol of the tests")

    def _exactly(self, num_bytes: int) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            self._wait(select.POLLIN)
            try:
                chunk = self._channel.recv(min(num_bytes - len(content), 1 << 20))
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            if not chunk:
                self._end(self._how_it_ended())
            content += chunk
        return bytes(content)

    def _wait(self, event: int) -> None:
        try:
            while not self._run.wait({self._channel.fileno(): event}):
                with contextlib.suppress(BlockingIOError):  # its last words may still lie in the channel
                    if event == select.POLLIN and self._channel.recv(1, socket.MSG_PEEK):
                        return
                self._end(self._how_it_ended())
        except Stopped as stopped:
            self._end(stopped.why)

    def _how_it_ended(self) -> str:
        give_up_s = time.monotonic() + 0.5  # the channel may close a moment before the process is gone
        try:
            while self._run.status is None and time.monotonic() < give_up_s:
                self._run.wait({})
        except Stopped as stopped:
            return stopped.why
        status = self._run.status
        return "it closed its connection" if status is None else f"it ended early ({words_for(status, self._limits)})"

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


def _open_channel(cell: Cell) -> socket.socket:
    """Begin the program's process, its channel a socket and everything else nothing."""
    ours, theirs = socket.socketpair()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        cell.begin("calls", [nothing, nothing, nothing, theirs.fileno()])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(nothing)
    ours.setblocking(False)
    return ours


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
