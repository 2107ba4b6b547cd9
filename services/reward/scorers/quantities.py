r"""Parses numbers with units, currencies, percent and thousands separators, and times of day.

Expressions that have to be computed are in maths.py. Texts come from `normal` in notation.py.

A unit counts if both sides have a known one: `5 m` equals 500 cm and not 5 cm; if one side has none, the numbers are
compared. A percentage equals its number and its hundredth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 120
MAX_POWER = 300
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_TOP, _BOTTOM = (rf"(?:\{{\s*(?P<{name}>-?{_DIGITS})\s*\}}|(?P<{name}_digit>\d))" for name in ("top", "bottom"))
_FRACTION = rf"\\[dtc]?frac\s*{_TOP}\s*{_BOTTOM}"
_PATTERNS = tuple(
    re.compile(rf"(?P<sign>[+-]?)\s*{pattern}", re.ASCII)
    for pattern in (
        rf"(?P<whole>{_DIGITS})\s*{_FRACTION}",
        r"(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)",
        _FRACTION,
        rf"(?P<top>{_DIGITS})\s*/\s*(?P<bottom>-?{_DIGITS})(?![\d.])",
        r"(?P<before>\d*)\.(?P<fixed>\d*)\\(?:overline|bar)\s*\{(?P<again>\d+)\}",
        rf"(?P<decimal>{_DIGITS}(?:\.\d*)?|\.\d+)\s*"
        r"(?:[eE]\s*\+?|(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*)\{?\s*(?P<power>-?\d{1,3})\s*\}?(?![\d.])",
        r"(?P<ten>10)\s*(?:\^|\*\*)\s*(?:\{\s*(?P<power>-?\d{1,3})\s*\}|(?P<power_digits>\d{1,3})(?!\d))",
        rf"(?P<decimal>{_DIGITS}(?:\.\d*)?|\.\d+)(?![\d.,]*\d)",
    )
)
"""Patterns of a number at the start of a text, from the longest form to the simplest; the first match is used."""


@dataclass(frozen=True)
class Number:
    """A number and whether it was written as a decimal."""

    value: Fraction
    is_decimal: bool


def number_of(text: str) -> Number | None:
    """The number that the whole text is, or None."""
    found = _leading_number(_bare(text))
    return found[0] if found is not None and not found[1].strip() else None


def _bare(text: str) -> str:
    """The text without surrounding dollar signs, braces or brackets, and without a full stop at the end."""
    text = text.strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text.strip("$").strip()
    while text.startswith(("{", "(")) and text.endswith(("}", ")")) and not re.search(r"[{}()]", text[1:-1]):
        text = text[1:-1].strip()
    return text


def _leading_number(text: str) -> tuple[Number, str] | None:
    """The number at the start, and the rest."""
    if len(text) > MAX_CHARS:
        return None
    for pattern in _PATTERNS:
        match = pattern.match(text)
        if match is not None and (value := _value(match.groupdict())) is not None:
            is_decimal = "." in match.group() and "\\overline" not in match.group()
            return Number(-value if match["sign"] == "-" else value, is_decimal), text[match.end() :]
    return None


def _value(part: Mapping[str, str | None]) -> Fraction | None:
    def integer(name: str) -> int:
        return int(re.sub(r"[ ,]", "", part.get(name) or part.get(f"{name}_digit") or "0"))

    if "top" in part:
        bottom = integer("bottom")
        return Fraction(integer("whole")) + Fraction(integer("top"), bottom) if bottom else None
    if "again" in part:
        fixed, again = part["fixed"] or "", part["again"] or ""
        nines = 10 ** len(fixed) * (10 ** len(again) - 1)
        return Fraction(int((part["before"] or "") + fixed or "0"), 10 ** len(fixed)) + Fraction(int(again), nines)
    power = int(part.get("power") or part.get("power_digits") or 0)
    if abs(power) > MAX_POWER:
        return None
    if "ten" in part:
        return Fraction(10) ** power
    decimal = re.sub(r"[ ,]", "", part["decimal"] or "").removesuffix(".")
    return Fraction(decimal) * Fraction(10) ** power if decimal else None


# ---------------------------------------------------------------- units

_UNITS: Mapping[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(factor))
    for dimension, names in {
        "length": {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000", "inch": "127/5000", "in": "127/5000",
                   "foot": "381/1250", "feet": "381/1250", "ft": "381/1250", "yard": "1143/1250", "yd": "1143/1250",
                   "mile": "201168/125", "mi": "201168/125", "millimeter": "1/1000", "centimeter": "1/100",
                   "meter": "1", "metre": "1", "kilometer": "1000", "kilometre": "1000", "centimetre": "1/100",
                   "millimetre": "1/1000"},
        "mass": {"mg": "1/1000", "g": "1", "gram": "1", "kg": "1000", "kilogram": "1000"},
        "weight": {"pound": "16", "lb": "16", "ounce": "1", "oz": "1"},
        "time": {"second": "1", "sec": "1", "s": "1", "minute": "60", "min": "60", "hour": "3600", "hr": "3600",
                 "h": "3600", "day": "86400", "week": "604800"},
        "money": {"cent": "1/100", "dollar": "1", "usd": "1", "buck": "1"},
        "euro": {"euro": "1", "eur": "1"},
        "volume": {"ml": "1/1000", "milliliter": "1/1000", "l": "1", "liter": "1", "litre": "1"},
        "angle in degrees": {"degree": "1", "deg": "1"},
        "angle in radians": {"radian": "1", "rad": "1"},
        "celsius": {"celsius": "1"},
        "fahrenheit": {"fahrenheit": "1"},
    }.items()
    for name, factor in names.items()
}  # fmt: skip
_SPEEDS = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "fps": "foot/second", "mps": "m/second"}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_DEGREES = {"c": "celsius", "celsius": "celsius", "f": "fahrenheit", "fahrenheit": "fahrenheit"}
_UNIT = re.compile(
    r"(?:(square|sq|cubic|cu|degrees?)\.?\s+)?(\w+)\.?\s*(?:\^\s*\{?\s*([23])\s*\}?|\b(squared|cubed))?", re.IGNORECASE
)
_NO_UNITS = frozenset(
    word
    for line in (
        "or and to not no isnt is are was if else then but than plus minus times over under by between through until",
        "pi sqrt mod log ln sin cos tan exp choose factorial root half third quarter x y z n k",
        "wrong false incorrect maybe perhaps either neither nor except",
    )
    for word in line.split()
)
"""Words that are not units and change the meaning of the number before them."""
_QUALIFYING = frozenset(
    ("less", "more", "fewer", "if", "is", "isn", "was", "not", "wrong", "incorrect", "but", "unless", "when", "except")
)
_CURRENCY = re.compile(r"(?P<sign>-?)\s*(?P<name>\\\$|\$|\u20ac|\u00a3|\u00a5|\\euro|\\pounds)\s*")
_CURRENCIES = {"\\$": "money", "$": "money", "\u20ac": "euro", "\\euro": "euro"}
_DRESS = re.compile(r"\\(?:text|textrm|textit|textbf|mathrm|mathit|mathbf|rm|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:!> ]|~|\\quad|\s+")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+)\s*\}")
_TAIL = re.compile(r"[A-Za-z][A-Za-z .'/^{}23-]*")


@dataclass(frozen=True)
class Quantity:
    """A quantity: value times factor in the dimension's base unit; dimension empty: no unit, or an unknown one."""

    number: Number
    dimension: str = ""
    factor: Fraction = Fraction(1)
    is_percent: bool = False
    is_compound: bool = False


def without_formatting(text: str) -> str:
    r"""Words without `\text{...}` around them, with every kind of space replaced by one space."""
    return _SPACES.sub(" ", _DRESS.sub(r" \1 ", _DRESS.sub(r" \1 ", text))).strip()


def quantity_of(text: str) -> Quantity | None:
    """The number with its unit that the whole text is, or None."""
    text = _bare(text).rstrip(". ")
    dressed_start = _DRESS.match(text)
    if dressed_start is not None:  # a word before the number, or a number formatted as text
        text = without_formatting(text)
    dimension, sign = "", ""
    if (currency := _CURRENCY.match(text)) is not None:
        dimension, sign = _CURRENCIES.get(currency["name"], currency["name"]), currency["sign"]
        text = text[currency.end() :]
    found = _leading_number(sign + text)
    if found is None:
        return None
    number, tail = found
    if dimension and not tail.strip():
        return Quantity(number, dimension)
    if (compound := _compound(text)) is not None:
        return compound
    quantity = _with_tail(number, tail)
    if quantity is None:
        return None
    if dimension and quantity.dimension in ("", dimension):
        quantity = Quantity(quantity.number, dimension, Fraction(1), quantity.is_percent)
    return quantity


def is_qualified(text: str) -> bool:
    """Whether a number is followed by words that change or negate it: `8 less than 10`, `8 is wrong`, `8 if x > 0`."""
    found = _leading_number(without_formatting(_bare(text)))
    words = re.findall(r"[A-Za-z]+", found[1]) if found is not None else []
    return bool(words) and words[0].lower() in _QUALIFYING


def _with_tail(number: Number, tail: str) -> Quantity | None:
    """The number with its unit; None if the tail is more than a unit."""
    is_apart = not tail or tail[0] in " ~\\^%"
    tail = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])", " degree ", tail)
    tail = without_formatting(_UNIT_FRACTION.sub(r" \1/\2 ", _DRESS.sub(r" \1 ", tail)))
    if not tail:
        return Quantity(number)
    if re.fullmatch(r"\\?%|(?i:per ?cent|percent|pct)\.?", tail):
        return Quantity(number, is_percent=True)
    if not _TAIL.fullmatch(tail):
        return None
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", tail)]
    if words[0] in _SCALES and not set(words) & _NO_UNITS:
        scaled = Number(number.value * _SCALES[words[0]], number.is_decimal)
        return _with_tail(scaled, tail[len(words[0]) :] or "")
    known = _known_unit(tail)
    if known is not None:
        return Quantity(number, *known)
    is_word = is_apart and len(words) <= 6 and not set(words) & _NO_UNITS and max(map(len, words)) > 1
    return Quantity(number) if is_word and not set(words) & _SCALES.keys() else None


def _known_unit(text: str) -> tuple[str, Fraction] | None:
    """Dimension and factor of `cm`, `square feet`, `cm^2`, `m/s`, `miles per hour`."""
    text = re.sub(r"(?i)(?<=[a-z. ])\bper\b", "/", text.strip()).strip(" .")
    text = _SPEEDS.get(text.lower(), text)
    above, slash, below = text.partition("/")
    if slash:
        top, bottom = _known_unit(above), _known_unit(below)
        return None if top is None or bottom is None else (f"{top[0]}/{bottom[0]}", top[1] / bottom[1])
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    before, word, written, spelt = match.groups()
    if before and before.lower() not in _POWERS:
        scale = _DEGREES.get(word.lower())
        return None if scale is None else (scale, Fraction(1))
    unit = _unit(word)
    if unit is None:
        return None
    power = int(written or _POWERS.get((spelt or before or "").lower(), 1))
    return (unit[0] if power == 1 else f"{unit[0]}^{power}"), unit[1] ** power


def is_unit(word: str) -> bool:
    """Whether a word is a known unit."""
    return _unit(word) is not None


def _unit(word: str) -> tuple[str, Fraction] | None:
    lower = word.lower()
    for name in (word, lower, lower.removesuffix("es"), lower.removesuffix("s") if len(word) > 2 else word):
        if name in _UNITS:
            return _UNITS[name]
    return None


_PART = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]+)\.?\s*(?:,\s*)?(?:and\b|&)?\s*", re.ASCII)


def _compound(text: str) -> Quantity | None:
    """`3 hours and 20 minutes`, `4 ft 3 in`: parts of one dimension, each smaller than the one before."""
    text, position, total, num_parts = without_formatting(text), 0, Fraction(0), 0
    dimension, last = "", None
    while position < len(text):
        part = _PART.match(text, position)
        unit = _unit(part["unit"]) if part is not None else None
        if (
            part is None
            or unit is None
            or (dimension and unit[0] != dimension)
            or (last is not None and unit[1] >= last)
        ):
            return None
        dimension, last = unit
        total += Fraction(part["number"]) * unit[1]
        position, num_parts = part.end(), num_parts + 1
    return Quantity(Number(total, False), dimension, Fraction(1), is_compound=True) if num_parts > 1 else None


# ---------------------------------------------------------------- comparing


def are_equal_numbers(gold: Fraction, number: Fraction, has_decimals: bool, float_digits: int) -> bool:
    """Compare integers and fractions exactly, and to `float_digits` decimal places if one side was written as a
    decimal.

    Below 1 the places count from the first non-zero one, so that small numbers are not all equal.
    """
    if not has_decimals:
        return gold == number
    scale = min(Fraction(1), abs(gold)) if gold else Fraction(1)
    return abs(gold - number) * 2 < scale / 10**float_digits


def are_equal(gold: Quantity, answer: Quantity, float_digits: int) -> bool:
    """Whether two quantities are equal."""
    has_decimals = gold.number.is_decimal or answer.number.is_decimal
    one, other = gold.number.value, answer.number.value
    if gold.dimension and answer.dimension:
        if gold.dimension != answer.dimension:
            return False
        return are_equal_numbers(one * gold.factor, other * answer.factor, has_decimals, float_digits)
    if gold.is_compound != answer.is_compound:
        return False
    if are_equal_numbers(one, other, has_decimals, float_digits):
        return True
    if gold.is_percent == answer.is_percent:
        return False
    if gold.is_percent:
        return are_equal_numbers(one / 100, other, has_decimals, float_digits)
    return are_equal_numbers(one, other / 100, has_decimals, float_digits)


_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.ASCII | re.IGNORECASE)
_HOUR = re.compile(r"(\d{1,2})()()\s*([ap])\.?\s*m\.?", re.ASCII | re.IGNORECASE)


def time_of_day(text: str) -> tuple[int, int, int, str] | None:
    """(hour, minute, second, half of the day or "") of `3:45`, `2:30 p.m.`, `5 pm`; None for anything else."""
    plain = without_formatting(_bare(text)).replace("{:}", ":").replace(" :", ":").replace(": ", ":")
    match = _CLOCK.fullmatch(plain) or _HOUR.fullmatch(plain)
    if match is None:
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = (match[4] or "").lower()
    if minute > 59 or second > 59 or hour > (12 if half else 24):
        return None
    return hour, minute, second, half


def are_equal_times(gold: tuple[int, int, int, str], answer: tuple[int, int, int, str]) -> bool:
    """Whether two times are equal; if one side does not specify the half of the day, the other's is assumed."""
    if gold[3] and answer[3]:
        return gold == answer
    if gold[:3] == answer[:3]:
        return True
    return _of_24(gold) == _of_24(answer)


def _of_24(time: tuple[int, int, int, str]) -> tuple[int, int, int]:
    hour, minute, second, half = time
    return (hour % 12 + (12 if half == "p" else 0) if half else hour), minute, second
