"""Scorer `math`: is the final answer of a response equivalent to the gold answer of the row?

Owns: its options, the short cut for plain numbers, what is too large to be evaluated, the call of math-verify.
Refuses: where the answer stands (final_answer), time limits: math-verify's own use SIGALRM and are off here; slow
symbolic work is ended from outside by killing the process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version as installed_version
from typing import Any

from pydantic import Field

from areal_like.config import Settings
from areal_like.errors import UserError
from services.reward.scorers import final_answer, notation
from services.reward.scorers.port import CannotJudge, ScorerInput


class MathOptions(Settings):
    """How answers are found and compared."""

    gold_field: str | None = None
    """Column of the gold answer; None: `answer`, `final_answer`, `gold`, or the box in `solution`."""
    rules: tuple[final_answer.Rule, ...] = Field(final_answer.ALL_RULES, min_length=1)
    """Where the final answer may stand, in order; ["boxed"] accepts boxed answers only, ["pattern"] what you say."""
    pattern: str | None = None
    """Regular expression for the rule `pattern`; its first group (else all of it) of its last match is the answer."""
    must_stop: bool = False
    """A response cut at the token limit counts as wrong."""
    float_digits: int = Field(6, ge=1, le=15)
    """Decimal places that count where one side is a decimal number."""
    max_response_chars: int = Field(50_000, gt=0)
    """Only this much of a response's end is read."""
    max_answer_chars: int = Field(400, gt=0)
    """A longer final answer counts as right only if it equals the gold answer literally."""


class MathScorer:
    """1.0 for an equivalent answer, else 0.0; `correct` is the same."""

    def __init__(self, options: MathOptions) -> None:
        self._options = options
        self._pattern = _compiled(options)
        self.version = f"2/math-verify-{installed_version('math-verify')}"

    def warm_up(self) -> None:
        """Import sympy and build the parser's tables."""
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off: they must be
        are_equivalent(r"\frac{1}{2}", r"x^2+\sqrt{2}", self._options.float_digits)

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        gold = final_answer.of_row(sample.row, options.gold_field)
        if gold is None:
            fields = options.gold_field or ", ".join(final_answer.GOLD_FIELDS)
            raise CannotJudge(f"the row has no gold answer (looked for {fields})")
        answer = final_answer.of_response(sample.response[-options.max_response_chars :], options.rules, self._pattern)
        is_right = (
            answer is not None
            and (not options.must_stop or sample.finish_reason == "stop")
            and self._is_equivalent(gold, answer)
        )
        return {"value": float(is_right), "correct": float(is_right)}

    def _is_equivalent(self, gold: str, answer: str) -> bool:
        if _squeezed(gold) == _squeezed(answer):
            return True
        if len(answer) > self._options.max_answer_chars:
            return False
        gold, answer = notation.normal(gold), notation.normal(answer)
        if is_explosive(answer) and not is_explosive(gold):
            return False
        if _only_letters(gold) and _only_letters(gold) == _only_letters(answer):
            return True
        if notation.is_hedged(answer) and not notation.is_hedged(gold) and not _has_several(gold):
            return False
        digits = self._options.float_digits
        gold_number, number = plain_number(gold), plain_number(answer)
        gold_unit, unit = notation.unit_of(gold), notation.unit_of(answer)
        if gold_unit is not None and unit is not None and gold_unit != unit:
            if gold_unit[0] != unit[0] or gold_number is None or number is None:
                return False
            return gold_number * gold_unit[1] == number * unit[1]
        if gold_number is not None and number is not None:
            return are_equal_numbers(gold_number, number, "." in gold or "." in answer, digits)
        gold, answer = notation.as_interval(gold), notation.as_interval(answer)
        return are_equivalent(gold, answer, digits) or _are_exactly_equivalent(gold, answer, digits)


_WRAPPING = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
_UNIT_WORDS = re.compile(r"(?<=[\d.])\s+((?:[A-Za-z]{2,}\.?\s*){1,3})$")
_NO_UNITS = re.compile(r"(?i)hundred|thousand|million|billion|trillion|dozen|percent|half|pi|sqrt|mod|or|and|to")
_PLAIN = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d*)?")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*\{?\(?\s*-?\s*(\d+)")
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*(\d+)\s*(?:\^|\*\*)[\s{(]*(\d+)\s*(\^|\*\*)?")
_FACTORIAL = re.compile(r"\d{4,}\)?\s*!|!\s*\)?\s*!")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_MAX_EXPONENT = 2000
_MAX_DIGITS = 100
_SUM_POWER = re.compile(r"[)}]\s*(?:\^|\*\*)\s*\{?\(?\s*(\d+)")
_MAX_SUM_EXPONENT = 60
"""A bracket to a higher power is not expanded."""
_MAX_DEPTH = 8


def _compiled(options: MathOptions) -> re.Pattern[str] | None:
    """The user's pattern. Raises UserError where it is none, or where rule and pattern do not go together."""
    if ("pattern" in options.rules) != (options.pattern is not None):
        raise UserError(
            "rule `pattern` and option `pattern` go together",
            where="math scorer",
            remedy="rules: [pattern, boxed], pattern: '<answer>(.*?)</answer>'",
        )
    try:
        return re.compile(options.pattern, re.DOTALL) if options.pattern is not None else None
    except re.error as error:
        raise UserError(f"pattern is no regular expression: {error}", where="math scorer", remedy="mend it") from error


def _squeezed(text: str) -> str:
    return re.sub(r"\s+|\\[,;!]|^\$+|\$+$", "", text)


def _only_letters(text: str) -> str:
    r"""A choice or a word without its dress: `(B)`, `\text{B}`, `\textbf{(B)}` are `b`; "" for anything else."""
    bare = _WRAPPING.sub(r"\1", _WRAPPING.sub(r"\1", text)).strip("$ .:()").lower()
    return bare if bare.replace(" ", "").isalpha() and "\\" not in bare else ""


def _has_several(gold: str) -> bool:
    """The gold answer itself names several values: `1, 2`."""
    return "," in gold or "\\pm" in gold


def _are_exactly_equivalent(gold: str, answer: str, float_digits: int) -> bool:
    """A second look with decimals as exact fractions and `i` as the imaginary unit; can only add exact equalities."""
    fresh = [notation.with_exact_decimals(text) for text in (gold, answer)]
    if _IMAGINARY.search(gold + " " + answer):
        fresh = [_IMAGINARY.sub(r"\\sqrt{-1}", text) for text in fresh]
    return fresh != [gold, answer] and are_equivalent(fresh[0], fresh[1], float_digits)


def plain_number(text: str) -> Fraction | None:
    """The number a text is (thousands commas, `$`, powers of ten and trailing unit words allowed), or None."""
    if (power := notation.scientific(text)) is not None:
        return power
    text = _WRAPPING.sub(r" \1", text).replace("\\$", "").replace("$", "").strip().rstrip(".")
    units = _UNIT_WORDS.search(text)
    if units is not None and not any(_NO_UNITS.fullmatch(word) for word in units.group(1).replace(".", " ").split()):
        text = text[: units.start()]
    text = text.replace(" ", "").replace("{,}", ",").removeprefix("+")
    if not _PLAIN.fullmatch(text) or not any(character.isdigit() for character in text) or len(text) > _MAX_DIGITS:
        return None
    return Fraction(text.replace(",", "").rstrip(".")) if text.isascii() else None


def are_equal_numbers(gold: Fraction, number: Fraction, has_decimals: bool, float_digits: int) -> bool:
    """Exact for integers; to `float_digits` decimal places where one side was written as a decimal."""
    return abs(gold - number) * 2 < Fraction(1, 10**float_digits) if has_decimals else gold == number


def is_explosive(text: str) -> bool:
    """True for what would take for ever or all memory when evaluated: towers of powers, huge exponents, factorials.

    Only saves work and keeps a joke like 9^9^9 from costing a process; what slips through is ended by its deadline.
    """
    if _FACTORIAL.search(text) or re.search(r"\d{300}", text) or _depth(text) > _MAX_DEPTH:
        return True
    for exponent, power, more in _TOWER.findall(text):
        if more or len(exponent) > 4 or len(power) > 4 or int(exponent) ** min(int(power), 12) > _MAX_EXPONENT:
            return True
    if any(int(exponent[:7]) > _MAX_SUM_EXPONENT for exponent in _SUM_POWER.findall(text)):
        return True
    return any(len(exponent) > 6 or int(exponent) > _MAX_EXPONENT for exponent in _EXPONENT.findall(text))


def _depth(text: str) -> int:
    """Deepest nesting of round and square brackets (the parser's time doubles with each)."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=512)
def _parsed(text: str) -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0)
    wrapped = text if re.match(r"^\$.*\$$", text, re.DOTALL) else f"${text}$"
    return tuple(parse(wrapped, extraction_config=[latex, ExprExtractionConfig()], parsing_timeout=None))


def are_equivalent(gold: str, answer: str, float_digits: int) -> bool:
    """math-verify's judgement of two LaTeX or plain expressions. May take for ever; never raises for odd input."""
    from math_verify import verify

    parsed_gold, parsed_answer = _parsed(gold), _parsed(answer)
    if not parsed_gold or not parsed_answer:
        return False
    return bool(verify(list(parsed_gold), list(parsed_answer), float_rounding=float_digits, timeout_seconds=None))
