"""Plain data between the judge and a program: Python expressions to the program, JSON from it.

Only exact built-in types, a few value types of the standard library (rebuilt here from their fields), handles and
callbacks are supported. Data from a sandbox is bounded, names no type that is not listed here, and never runs code
here. What comes out of a sandbox is read as data and nothing else: it is bounded, it names no type that is not listed
here, and none of its code runs here.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import json
from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

MAX_DEPTH = 150
MAX_FIELDS = 64
MAX_INT_DIGITS = 1 << 20
"""Hexadecimal digits of the longest accepted integer."""

_SHORT_INT = 1 << 1024
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
_DATES: dict[str, type] = {
    "date": datetime.date,
    "time": datetime.time,
    "datetime": datetime.datetime,
    "timedelta": datetime.timedelta,
}


class NotPlain(Exception):
    """An argument is not plain data and cannot be passed to a sandbox."""


class Forged(Exception):
    """An answer that this project's code cannot have written."""


def expression_of(value: Any, refer: Callable[[Any], str], depth: int = 0) -> str:
    """`value` as an expression that the sandbox can evaluate. `refer` writes values that are not plain, or raises
    NotPlain."""
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deeply")
    kind: Any = type(value)
    if kind in (bool, str, bytes, float, type(None), range):
        return ascii(value)
    if kind is complex:  # its repr may be `infj`, which is not an expression
        return f"complex({value.real!r},{value.imag!r})"
    if kind is int:
        return repr(value) if -_SHORT_INT < value < _SHORT_INT else hex(value)
    if kind in (list, tuple, set, frozenset):
        return _sequence(value, kind, refer, depth)
    if kind is dict:
        pairs = [f"{expression_of(k, refer, depth + 1)}:{expression_of(v, refer, depth + 1)}" for k, v in value.items()]
        return "{" + ",".join(pairs) + "}"
    if kind is bytearray:
        return repr(value)
    name = getattr(value, "__name__", None) if isinstance(value, type | BuiltinFunctionType) else None
    if type(name) is str and vars(builtins).get(name) is value:
        return f"B({name!r})"
    library = _library_fields(value, kind)
    if library is not None:
        fields = ",".join(expression_of(part, refer, depth + 1) for part in library)
        return f"L({kind.__module__!r},{kind.__name__!r},{fields})"
    return refer(value)


def _sequence(value: Any, kind: type, refer: Callable[[Any], str], depth: int) -> str:
    if kind in (list, tuple) and value and set(map(type, value)) <= {bool, str, bytes, type(None)}:
        return ascii(value)
    inner = ",".join([expression_of(item, refer, depth + 1) for item in value])
    if kind is list:
        return f"[{inner}]"
    if kind is tuple:
        return f"({inner},)" if value else "()"
    return f"{kind.__name__}([{inner}])"


def _library_fields(value: Any, kind: type) -> tuple[Any, ...] | None:
    """Arguments that make an equal value of a type of the standard library; None for other types."""
    if kind in (decimal.Decimal, fractions.Fraction):
        return (str(value),)
    if kind is datetime.date:
        return (value.year, value.month, value.day)
    if kind is datetime.datetime and value.tzinfo is None:
        return (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    if kind is datetime.time and value.tzinfo is None:
        return (value.hour, value.minute, value.second, value.microsecond)
    if kind is datetime.timedelta:
        return (value.days, value.seconds, value.microseconds)
    if kind is collections.deque:
        return (list(value), value.maxlen)
    if kind in (collections.Counter, collections.OrderedDict):
        return (dict(value),)
    if kind is collections.defaultdict:
        return (value.default_factory, dict(value))
    return None


MESSAGES = frozenset({"answer", "raised", "callback"})
"""Keys of which a message of a program contains one."""


def read_answer(text: bytes, make_handle: Callable[[int, str, str], Any]) -> dict[str, Any]:
    """Parse one message of a program. Raises Forged for an invalid one."""

    def untag(tagged: dict[str, Any]) -> Any:
        if len(tagged) == 1:
            (name, content), *_ = tagged.items()
            if name == "handle":
                number, what, type_name = content
                if type(number) is not int or type(what) is not str or type(type_name) is not str:
                    raise Forged("an invalid handle")
                return make_handle(number, what, type_name)
            if name in _READERS:
                return _READERS[name](content)
        return Untagged(tagged)

    try:
        message = json.loads(text, object_hook=untag)
    except Forged:
        raise
    except Exception as error:  # a parser may get any data: every exception means that it is invalid
        raise Forged(f"not a reply ({type(error).__name__})") from error
    if type(message) is not Untagged or not message.fields.keys() & MESSAGES:
        raise Forged("not a reply")
    return dict(message.fields)


class Untagged:
    """An object without a tag. Only the message itself may be one; within data it does not equal any value."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def _integer(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise ValueError("too long")
    return int(digits, 16)


def _listed(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A parser whose content must be a list, because a range could be endless."""

    def read(content: Any) -> Any:
        if type(content) is not list:
            raise TypeError("not a list")
        return make(content)

    return read


@lru_cache(maxsize=64)
def _namedtuple_type(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


def _named_tuple(content: list[Any]) -> Any:
    """A named tuple; a plain tuple if the field names are not valid."""
    name, fields, values = content
    names = (name, *fields)
    is_named = all(type(word) is str and word.isidentifier() and len(word) < 100 for word in names)
    if not is_named or len(fields) > MAX_FIELDS or len(fields) != len(values):
        return tuple(values)
    try:
        return _namedtuple_type(name, tuple(fields))(*values)
    except ValueError:  # a keyword, an underscore in front, a name twice
        return tuple(values)


def _built_in(name: str) -> Any:
    value = getattr(builtins, name, None)
    return value if isinstance(value, type) else _CONSTANTS["NotImplemented"]


def _text(content: Any) -> str:
    if type(content) is not str or len(content) > MAX_INT_DIGITS:
        raise ValueError(f"the value is not a string of at most {MAX_INT_DIGITS} characters")
    return content


def _fraction(content: Any) -> fractions.Fraction:
    numerator, _, denominator = _text(content).partition("/")
    return fractions.Fraction(int(numerator), int(denominator or "1"))


def _pairs(content: list[Any]) -> dict[Any, Any]:
    return {key: value for key, value in content}  # dict() would call keys() of a pair


def _maker(kind: type) -> Callable[[list[Any]], Any]:
    return lambda fields: kind(*fields)


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": _listed(tuple),
    "set": _listed(set),
    "frozenset": _listed(frozenset),
    "dict": _listed(_pairs),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "int": _integer,
    "complex": _listed(lambda parts: complex(*map(float, parts))),
    "range": _listed(lambda parts: range(*parts)),
    "constant": _CONSTANTS.__getitem__,
    "keys": _listed(lambda keys: dict.fromkeys(keys).keys()),
    "items": _listed(lambda pairs: _pairs(pairs).items()),
    "builtin": _built_in,
    "namedtuple": _listed(_named_tuple),
    "Decimal": lambda content: decimal.Decimal(_text(content)),
    "Fraction": _fraction,
    "Counter": _listed(lambda pairs: collections.Counter(_pairs(pairs))),
    "OrderedDict": _listed(lambda pairs: collections.OrderedDict(_pairs(pairs))),
    "defaultdict": _listed(lambda pairs: collections.defaultdict(None, _pairs(pairs))),
    "deque": _listed(lambda parts: collections.deque(_listed(list)(parts[0]), parts[1])),
    **{name: _listed(_maker(kind)) for name, kind in _DATES.items()},
}
