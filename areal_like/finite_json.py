"""Strict JSON parsing: NaN and Infinity, which Python's parser accepts, are errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

NOT_FINITE_REMEDY = "write null where there is no value, a finite number, or a text in quotes"


class NotFinite(ValueError):
    """The text contains a number that is not finite; the message names it."""


def loads_finite(text: str | bytes, parse_int: Callable[[str], Any] | None = None) -> Any:
    """`json.loads`, but with an error for NaN, Infinity and numbers beyond the range of a float.

    Raises NotFinite, and whatever json.loads raises.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=parse_int)


def _refuse(name: str) -> NoReturn:
    raise NotFinite(f"contains {name}, which is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise NotFinite(f"contains {digits[:40]}, which is beyond the range of a floating-point number")
    return number
