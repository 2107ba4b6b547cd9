"""Callbacks of the user: objects that receive the rows of a run and may add numbers.

A callback that fails or takes too long is disabled. Threads and queues are in sinks.py: a callback is a sink there, so
that a slow one delays nothing else and its lost rows are counted.

Numbers that a callback returns go into a separate row of metrics.jsonl with the same step or version, because the row
that it received has already been written.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_like.errors import UserError, first_line
from areal_like.import_path import import_factory

KEY = "callbacks"
METHODS = {"start": "on_start", "step": "on_step", "eval": "on_eval", "end": "on_end"}
"""Methods by kind of row; each is optional."""
ROWS: Mapping[str, tuple[str, str]] = {"step": ("callback_step", "step"), "eval": ("callback_eval", "version")}
"""Kind of the row with a callback's numbers, and its axis, by the kind of the row that the callback received."""
MAX_ROWS, MAX_NUMBERS = 1024, 256
"""Largest number of rows that wait for the controller, and of numbers per call. The rest is dropped."""


class Disabled(Exception):
    """The callback is no longer called."""


class CallbackSink:
    """One callback. `write` and `close` are called by the thread of the sink, everything else by the controller."""

    kinds = frozenset({"start", "step", "eval"})

    def __init__(
        self, label: str, target: Any, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._label, self._target = f"callback {label}", label, target
        self._timeout_s, self._clock = timeout_s, clock
        self._rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        self._began_s: float | None = None
        self._reason = ""

    def refusal(self) -> str:
        """Why it is no longer called; empty while it is. Also checks the duration of a running call."""
        began_s = self._began_s
        if not self._reason and began_s is not None and self._clock() - began_s > self._timeout_s:
            self._reason = f"a call took more than {self._timeout_s:g} s (callback_timeout_s)"
        return self._reason

    def write(self, record: Mapping[str, Any]) -> None:
        """Call the method for this row. Raises Disabled if it fails, and for every row after that."""
        if reason := self.refusal():
            raise Disabled(reason)
        found = self._call(METHODS[record["kind"]], dict(record))
        if reason := self.refusal():
            raise Disabled(reason)
        if record["kind"] in ROWS and (numbers := self._numbers(found)):
            kind, place = ROWS[record["kind"]]
            self._rows.append({"kind": kind, "time_s": record["time_s"], place: record[place], **numbers})

    def close(self) -> None:
        """Do nothing: no resource is open. `end` calls on_end."""

    def end(self, summary: Mapping[str, Any]) -> str:
        """Call on_end and wait for at most the timeout. Returns what went wrong as a sentence, or an empty text."""
        if self.refusal() or self._began_s is not None:
            return ""
        problems: list[str] = []

        def call() -> None:
            try:
                self._call("on_end", dict(summary))
            except Disabled as error:
                problems.append(f"{self.name}: {error}")

        thread = threading.Thread(target=call, name=self.name, daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            return f"{self.name}: on_end took more than {self._timeout_s:g} s (callback_timeout_s)"
        return problems[0] if problems else ""

    def take_rows(self) -> list[dict[str, Any]]:
        """Take the rows with the callback's numbers since the last call."""
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        return rows

    def _call(self, method: str, argument: dict[str, Any]) -> Any:
        call = getattr(self._target, method, None)
        if call is None:
            return None
        self._began_s = self._clock()
        try:
            return call(argument)
        except Exception as error:  # the user's own code may raise anything
            self._reason = f"{method} raised {type(error).__name__}: {first_line(error)}"
            raise Disabled(self._reason) from error
        finally:
            self.refusal()
            self._began_s = None

    def _numbers(self, found: Any) -> dict[str, float]:
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            self._reason = f"a method returned {type(found).__name__}, but must return None or a dict of numbers"
            raise Disabled(self._reason)
        numbers = {}
        for name, value in list(found.items())[:MAX_NUMBERS]:
            try:
                number = float(value)
            except (TypeError, ValueError):
                self._reason = f"the metric `{name}` is {type(value).__name__}, not a number"
                raise Disabled(self._reason) from None
            if math.isfinite(number):
                numbers[f"callback/{self._label}/{name}"] = number
        return numbers


def open_callbacks(names: Sequence[str], *, timeout_s: float) -> list[CallbackSink]:
    """Import and instantiate the callbacks. Raises UserError."""
    made = []
    for index, name in enumerate(names):
        where = f"{KEY}.{index}"
        factory = import_factory(name, where)
        try:
            target = factory()
        except Exception as error:  # the user's own code, as above
            raise UserError(
                f"calling {name} without arguments failed ({type(error).__name__}: {first_line(error)})",
                where=where,
                remedy="specify a class or function that can be called without arguments",
            ) from error
        if not any(callable(getattr(target, method, None)) for method in METHODS.values()):
            raise UserError(
                f"{name} has none of the methods {', '.join(METHODS.values())}",
                where=where,
                remedy="define at least one of these methods",
            )
        made.append(CallbackSink(name.partition(":")[2], target, timeout_s=timeout_s))
    return made
