"""JSON as the standard has it: without NaN and Infinity, which Python's reader takes.

Owns: reading a text of a user's, refusing numbers that are none. Refuses: saying where the text is from (the caller).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

NOT_FINITE_REMEDY = "write null where there is no value, a finite number, or a text in quotes"


class NotFinite(ValueError):
    """The text holds a number that is not finite; says which."""


def loads_finite(text: str | bytes, parse_int: Callable[[str], Any] | None = None) -> Any:
    """`json.loads`, but NaN, Infinity and numbers beyond the range of a float are refused.

    Raises NotFinite, and what json.loads raises.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=parse_int)


def _refuse(name: str) -> NoReturn:
    raise NotFinite(f"holds {name}, which is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise NotFinite(f"holds {digits[:40]}, which no floating-point number can hold")
    return number
