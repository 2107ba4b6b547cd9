r"""Ways of writing the same mathematics, brought to one before answers are compared.

Owns: `normal` (characters and commands that mean the same), numbers with powers of ten and with units, inequalities as
intervals, decimals as exact fractions, and `is_hedged`: an answer that names several candidates. Refuses: equivalence
(maths), where an answer stands (final_answer).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction

_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_SAME = (
    (re.compile(r"[\u2010-\u2015\u2212\ufe63\uff0d]"), "-"),
    (re.compile("\u00d7"), r"\\times "),
    (re.compile("\u00f7"), "/"),
    (re.compile("\u03c0"), r"\\pi "),
    (re.compile("\u221e"), r"\\infty "),
    (re.compile("\u2264"), r"\\le "),
    (re.compile("\u2265"), r"\\ge "),
    (re.compile("\u2205"), r"\\emptyset "),
    (re.compile("\u221a(\\w)"), r"\\sqrt{\1}"),
    (re.compile("\u00b0"), r"^\\circ"),
    (re.compile(r"\\(?:leqslant|leq)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\log_(?:e|\{e\})(?![a-zA-Z])"), r"\\ln "),
    (re.compile(r"\\(?:displaystyle|limits|left|right|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\})(?=\d{3}(?!\d))"), ""),
)
_FRACTIONS = {"\u00bd": "1/2", "\u2153": "1/3", "\u2154": "2/3", "\u00bc": "1/4", "\u00be": "3/4"}
_ENDING = re.compile(r"(?:\\[,;:! ]|[\s.,;])+$")


def normal(text: str) -> str:
    r"""The text with one character for each meaning: ASCII minus and digits, `\le`, `\emptyset`, no invisible ones."""
    text = _INVISIBLE.sub("", text)
    for character, written in _FRACTIONS.items():
        text = re.sub(rf"(\d){character}", rf"\1 {written}", text).replace(character, written)
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    return _ENDING.sub("", text.strip())


# ---------------------------------------------------------------- several candidates

_OR = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])|\|\||(?<![a-zA-Z\\])or(?![a-zA-Z])", re.IGNORECASE)
_UNSURE = re.compile(
    r"\?|(?<![a-zA-Z\\])(?:maybe|perhaps|either|probably|possibly|anything|whichever)(?![a-zA-Z])", re.I
)
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)


def is_hedged(text: str) -> bool:
    """True where a text names alternatives or doubts: `5 or 6`, `5?`, lines under each other outside a matrix."""
    bare = _ENVIRONMENT.sub("", text)
    return bool(_OR.search(bare) or _UNSURE.search(bare) or "\\\\" in bare)


# ---------------------------------------------------------------- powers of ten and units

_SCIENTIFIC = re.compile(
    r"(-?\d+(?:\.\d*)?|-?\.\d+)\s*(?:[eE]\s*\+?|(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*)(-?\d{1,3})\s*\}?"
)
_MAX_POWER = 300


def scientific(text: str) -> Fraction | None:
    r"""The number that `1.5e3` or `1.5 \times 10^{3}` is; None for any other text."""
    match = _SCIENTIFIC.fullmatch(text.strip().strip("$").strip())
    if match is None or abs(int(match.group(2))) > _MAX_POWER:
        return None
    return Fraction(match.group(1)) * Fraction(10) ** int(match.group(2))


_UNITS: Mapping[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(factor))
    for dimension, names in {
        "length": {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000", "inch": "127/5000", "in": "127/5000",
                   "foot": "381/1250", "feet": "381/1250", "ft": "381/1250", "yard": "1143/1250", "yd": "1143/1250",
                   "mile": "201168/125", "mi": "201168/125", "millimeter": "1/1000", "centimeter": "1/100",
                   "meter": "1", "metre": "1", "kilometer": "1000", "kilometre": "1000"},
        "mass": {"mg": "1/1000", "g": "1", "gram": "1", "kg": "1000", "kilogram": "1000"},
        "time": {"second": "1", "sec": "1", "s": "1", "minute": "60", "min": "60", "hour": "3600", "hr": "3600",
                 "h": "3600", "day": "86400", "week": "604800"},
        "money": {"cent": "1/100", "dollar": "1"},
        "volume": {"ml": "1/1000", "milliliter": "1/1000", "l": "1", "liter": "1", "litre": "1"},
    }.items()
    for name, factor in names.items()
}  # fmt: skip
_WITH_UNIT = re.compile(
    r"(?P<number>-?[\d.,/\s]*\d|-?\\frac\{\d+\}\{\d+\})\s*"
    r"(?:\\(?:text|mathrm|rm|mbox)\s*\{\s*(?P<wrapped>[a-zA-Z]+)\.?\s*\}|(?<=[\s~])(?P<bare>[a-zA-Z]+)\.?)\s*"
    r"(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?"
)


def unit_of(text: str) -> tuple[str, Fraction] | None:
    r"""Dimension and size of the unit a text ends with (`5 \text{ cm}^2`: ("length^2", 1/10000)); None without one."""
    match = _WITH_UNIT.fullmatch(text.replace("\\,", " ").replace("\\ ", " ").strip().strip("$").strip())
    if match is None:
        return None
    word = match["wrapped"] or match["bare"]
    known = _UNITS.get(word) or _UNITS.get(word.lower()) or _UNITS.get(word.lower().removesuffix("es"))
    known = known or (_UNITS.get(word.lower().removesuffix("s")) if len(word) > 3 else None)
    if known is None:
        return None
    power = int(match["power"] or 1)
    return (known[0] if power == 1 else f"{known[0]}^{power}"), known[1] ** power


# ---------------------------------------------------------------- inequalities and decimals

_ONE_SIDED = re.compile(r"\(?\s*[a-zA-Z]\s*(<|>|\\le|\\ge|\\lt|\\gt)\s*([^<>=]+?)\s*\)?")
_TWO_SIDED = re.compile(r"([^<>=]+?)\s*(<|\\le|\\lt)\s*[a-zA-Z]\s*(<|\\le|\\lt)\s*([^<>=]+)")
_COMPARISON = re.compile(r"[<>]|\\(?:le|ge|lt|gt)(?![a-zA-Z])")
_MEMBER = re.compile(r"[a-zA-Z]\s*\\in\s*(.+)", re.DOTALL)
_DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d{1,9})(?![\d.])")


def as_interval(text: str) -> str:
    r"""An inequality in one letter as the interval it is (`x \le 3`: `(-\infty, 3]`); any other text as it stands."""
    text = text.strip().strip("$").strip()
    if (member := _MEMBER.fullmatch(text)) is not None:
        return member.group(1).strip()
    if not _COMPARISON.search(text):
        return text
    if (match := _TWO_SIDED.fullmatch(text)) is not None and "\\le" not in match.group(1) + match.group(4):
        low, left, right, high = match.groups()
        return ("[" if left == "\\le" else "(") + f"{low}, {high}" + ("]" if right == "\\le" else ")")
    if (match := _ONE_SIDED.fullmatch(text)) is None or "\\le" in match.group(2) or "\\ge" in match.group(2):
        return text
    sign, end = match.groups()
    return {
        "<": rf"(-\infty, {end})", r"\lt": rf"(-\infty, {end})", r"\le": rf"(-\infty, {end}]",
        ">": rf"({end}, \infty)", r"\gt": rf"({end}, \infty)", r"\ge": rf"[{end}, \infty)",
    }[sign]  # fmt: skip


def with_exact_decimals(text: str) -> str:
    r"""Every decimal number as a fraction: `2^{0.5}` becomes `2^{\frac{5}{10}}`, so that it can be compared exactly."""
    return _DECIMAL.sub(lambda found: rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}", text)
