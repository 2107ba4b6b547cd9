"""The inside of a sandbox, second part: writes a program's values as JSON for the judge (see inside.py).

JSON has one tag per kind of value. Plain data of built-in types is written as such, a subclass of one as its base data,
a few values of the standard library by their fields; any other object stays here and is sent as the number of a handle.
The program may have replaced all of this, so the judge does not trust it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 200
MAX_NAME_CHARS = 300
FIELDS_OF = {
    "date": ("year", "month", "day"),
    "time": ("hour", "minute", "second", "microsecond"),
    "datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    "timedelta": ("days", "seconds", "microseconds"),
}
COROUTINE_FLAG = 0x80


class CannotPass(Exception):
    """A value is nested too deeply to be written."""


def tag(name: str, content: str) -> str:
    """A value of kind `name`."""
    return f'{{"{name}":{content}}}'


def load_json_text() -> Callable[[str], str]:
    """The C function that writes a text as JSON, because importing `json` takes as long as the rest of the start."""
    try:
        from _json import encode_basestring_ascii
    except ImportError:
        from json import dumps as encode_basestring_ascii
    return encode_basestring_ascii


class Writer:
    """Writes values. `write` returns the JSON of a value. `keep` returns the number of a handle for an object."""

    def __init__(self, keep: Callable[[Any], int]) -> None:
        self.keep, self.text = keep, load_json_text()
        self.fixed = frozenset((type(None), bool, int, float, str, bytes, complex, range))
        self.exact: dict[type, Callable[[Any, int], str]] = {
            type(None): lambda value, depth: "null",
            bool: lambda value, depth: "true" if value else "false",
            int: self.integer,
            float: self.real,
            str: lambda value, depth: self.text(value),
            list: self.items,
            tuple: lambda value, depth: tag("tuple", self.items(value, depth)),
            set: lambda value, depth: tag("set", self.items(value, depth)),
            frozenset: lambda value, depth: tag("frozenset", self.items(value, depth)),
            dict: lambda value, depth: tag("dict", self.pairs(value, depth)),
            bytes: lambda value, depth: tag("bytes", f'"{value.hex()}"'),
            bytearray: lambda value, depth: tag("bytearray", f'"{value.hex()}"'),
            complex: lambda value, depth: tag("complex", self.items((value.real, value.imag), depth)),
            range: lambda value, depth: tag("range", self.items((value.start, value.stop, value.step), depth)),
            type(...): lambda value, depth: tag("constant", '"Ellipsis"'),
            type(NotImplemented): lambda value, depth: tag("constant", '"NotImplemented"'),
            type({}.keys()): lambda value, depth: tag("keys", self.items(value, depth)),
            type({}.items()): lambda value, depth: tag("items", self.items(value, depth)),
        }
        self.bare: dict[type, Callable[[Any], Any]] = {
            int: int.__int__,
            float: float.__float__,
            str: str.__str__,
            list: lambda value: [*list.__iter__(value)],
            tuple: lambda value: (*tuple.__iter__(value),),
            set: lambda value: {*set.__iter__(value)},
            frozenset: lambda value: frozenset(frozenset.__iter__(value)),
            dict: lambda value: dict(dict.items(value)),
            bytes: lambda value: b"".join([value]),
            bytearray: lambda value: bytearray(b"".join([value])),
        }

    def write(self, value: Any, depth: int = 0) -> str:
        """JSON of a value. Raises CannotPass, and any exception of an object that is inspected."""
        if depth > MAX_DEPTH:
            raise CannotPass
        kind = type(value)
        writer = self.exact.get(kind)
        if writer is not None:
            return writer(value, depth + 1)
        return self.other(value, kind, depth + 1)

    def integer(self, value: int, depth: int) -> str:
        return repr(value) if -(1 << 63) <= value < 1 << 63 else tag("int", f'"{value:x}"')

    def real(self, value: float, depth: int) -> str:
        if value - value == 0.0:
            return repr(value)
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"

    def items(self, values: Any, depth: int) -> str:
        kinds = set(map(type, values)) if type(values) in (list, tuple) else None
        if kinds == {str}:
            return "[" + ",".join(map(self.text, values)) + "]"
        return "[" + ",".join([self.write(value, depth) for value in values]) + "]"

    def pairs(self, values: Any, depth: int) -> str:
        pairs = [f"[{self.write(key, depth)},{self.write(value, depth)}]" for key, value in dict.items(values)]
        return "[" + ",".join(pairs) + "]"

    def other(self, value: Any, kind: type, depth: int) -> str:
        """A value of the standard library, a subclass of a built-in type, or a handle."""
        module, name = kind.__module__, kind.__name__
        home = sys.modules.get(module) if type(module) is str else None
        if home is not None and getattr(home, name, None) is kind:
            encoded = self.library_value(value, module, name, depth)
            if encoded is not None:
                return encoded
        fields = getattr(kind, "_fields", None)
        if tuple in kind.__mro__ and type(fields) is tuple and len(fields) == tuple.__len__(value):
            content = [self.text(str(name)), self.items([str(field) for field in fields], depth)]
            return tag("namedtuple", f"[{','.join(content)},{self.items(self.bare[tuple](value), depth)}]")
        for base in kind.__mro__:
            if base in self.bare:
                return self.write(self.bare[base](value), depth)
        return self.handle(value)

    def library_value(self, value: Any, module: str, name: str, depth: int) -> str | None:
        if (module, name) in (("decimal", "Decimal"), ("fractions", "Fraction")):
            return tag(name, self.text(str(value)))
        if module == "datetime" and name in FIELDS_OF and getattr(value, "tzinfo", None) is None:
            return tag(name, self.items([getattr(value, field) for field in FIELDS_OF[name]], depth))
        if module == "collections" and name in ("Counter", "OrderedDict", "defaultdict"):
            return tag(name, self.pairs(value, depth))
        if module == "collections" and name == "deque":
            return tag(name, self.items([list(value), value.maxlen], depth))
        if module == "numpy" and getattr(value, "ndim", None) == 0:
            return self.write(value.item(), depth)
        return None

    def handle(self, value: Any) -> str:
        """The number of a handle, its capabilities, and the name of its type (of itself, for a type)."""
        kind = type(value)
        if kind is type and value.__module__ == "builtins":
            return tag("builtin", self.text(value.__name__))
        if isinstance(value, type):
            what = "exception" if issubclass(value, BaseException) else "class"
        elif hasattr(kind, "__next__"):
            what = "iterator"
        elif callable(value):
            flags = getattr(getattr(value, "__code__", None), "co_flags", 0)
            what = "async" if type(flags) is int and flags & COROUTINE_FLAG else "function"
        else:
            what = "module" if kind is type(sys) else "object"
        name = value.__name__ if isinstance(value, type) else kind.__name__
        return tag("handle", f'[{self.keep(value)},"{what}",{self.text(str(name)[:MAX_NAME_CHARS])}]')
