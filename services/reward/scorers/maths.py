"""Scorer `math`: compares the final answer of a response with the gold answer of the row.

It tries comparisons in order, rejects expressions that are too large to evaluate, and calls math-verify. Extraction is
in final_answer.py, notation in notation.py, quantities.py and regions.py. math-verify's own time limits use SIGALRM and
are off: the process is killed from outside if symbolic work takes too long.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version as installed_version
from typing import Any

from services.reward.scorer_options import MathOptions
from services.reward.scorers import final_answer, notation, quantities, regions
from services.reward.scorers.port import CannotJudge, ScorerInput


class MathScorer:
    """Returns 1.0 for an equivalent answer, else 0.0; `correct` is the same."""

    def __init__(self, options: MathOptions) -> None:
        self._options = options
        self._pattern = re.compile(options.pattern, re.DOTALL) if options.pattern is not None else None
        self.version = f"4/math-verify-{installed_version('math-verify')}"

    def warm_up(self) -> None:
        """Import sympy and build the parser's tables."""
        logging.getLogger("math_verify").setLevel(
            logging.ERROR
        )  # it warns that its timeouts are off, which is intended
        are_equivalent(r"\frac{1}{2}", r"x^2+\sqrt{2}", self._options.float_digits)

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        gold = final_answer.of_row(sample.row, options.gold_field)
        if gold is None:
            fields = options.gold_field or ", ".join(final_answer.GOLD_FIELDS)
            raise CannotJudge(f"the row has no gold answer (looked for {fields})")
        is_right = (not options.must_stop or sample.finish_reason == "stop") and self._is_right(gold, sample.response)
        return {"value": float(is_right), "correct": float(is_right)}

    def _is_right(self, gold: str, response: str) -> bool:
        text = response[-self._options.max_response_chars :]
        answer = final_answer.of_response(text, self._options.rules, self._pattern)
        if answer is None:
            return False
        if self.is_equivalent(gold, answer):
            return True
        several = final_answer.boxes_side_by_side(text) if self._options.rules[0] == "boxed" else []
        return bool(several) and all(self.is_equivalent(gold, one) for one in several)

    def is_equivalent(self, gold: str, answer: str) -> bool:
        """Whether a final answer is the gold answer, in any notation."""
        if squeezed(gold) == squeezed(answer):
            return True
        if len(answer) > self._options.max_answer_chars:
            return False
        gold, answer = notation.normal(gold), notation.normal(answer)
        if not answer or (is_explosive(answer) and not is_explosive(gold)):
            return False
        if len(answer) > max(_MIN_LONG_CHARS, _LONG_FACTOR * len(gold)):
            return False
        if squeezed(gold) == squeezed(answer):
            return True
        gold_choice, gold_rest = notation.choice_of(gold)
        choice, rest = notation.choice_of(answer)
        if gold_choice and choice:
            return gold_choice == choice
        gold, answer = gold_rest or gold, rest or answer
        for read in (notation.only_letters, notation.plain_words):
            if read(gold) and read(gold) == read(answer):
                return True
        return self._is_equal_mathematics(regions.as_interval(gold), regions.as_interval(answer))

    def _is_equal_mathematics(self, gold: str, answer: str) -> bool:
        digits = self._options.float_digits
        if notation.is_hedged(answer) and not notation.is_hedged(gold) and not _has_several(gold):
            return False
        if notation.is_hedged(gold):
            gold, answer = notation.as_list(gold), notation.as_list(answer)
        if notation.is_one_sided(answer) and not notation.is_one_sided(gold):
            return False
        if notation.is_unfinished(answer) and not notation.is_unfinished(gold):
            return False
        based = _are_equal_in_base(gold, answer)
        if based is not None:
            return based
        times = quantities.time_of_day(gold), quantities.time_of_day(answer)
        if times[0] is not None and times[1] is not None:
            return quantities.are_equal_times(times[0], times[1])
        quantity, other = quantities.quantity_of(gold), quantities.quantity_of(answer)
        if quantity is not None and other is not None:
            return quantities.are_equal(quantity, other, digits)
        if quantity is not None and quantities.is_qualified(answer):
            return False
        if _is_set(answer) and _is_tuple(gold):
            return False
        if _is_tuple(gold) or _is_tuple(answer):
            gold, answer = notation.as_tuple(gold), notation.as_tuple(answer)
        gold, answer = (_readable(notation.with_repeating_decimals(text)) for text in (gold, answer))
        if not (are_equivalent(gold, answer, digits) or _are_exactly_equivalent(gold, answer, digits)):
            return False
        return not _contradicts_itself(answer, digits)


_EXPONENT = re.compile(r"(?:\^|\*\*)\s*\{?\(?\s*-?\s*(\d+)")
_NESTED = re.compile(r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^|_\s*\{[^{}]*_\s*\{[^{}]*_")
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*(\d+)\s*(?:\^|\*\*)[\s{(]*(\d+)\s*(\^|\*\*)?")
_FACTORIAL = re.compile(
    r"\d{4,}\)?\s*!|!\s*\)?\s*!|\\(?:Gamma|[dt]?binom)(?![a-zA-Z])[^a-zA-Z]*(?:\d{4}|\^)|\d{4,}\s*\\choose"
)
_LIMITING = re.compile(
    r"\\(?:i{1,3}nt|oint|lim|limsup|liminf)(?![a-zA-Z])"
    r"|\\(?:sum|prod)(?![a-zA-Z])[^^]*\^\s*\{?\s*(?:\d{4}|10\s*\^|[^}]*(?:\\infty|\^|!))"
)
"""Integrals and limits, and sums and products of many terms, which are not evaluated: an answer must be their value."""
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_KEPT = ("pi", "st", "nd", "rd", "th")
_MAX_EXPONENT = 2000
_SUM_POWER = re.compile(r"[)}]\s*(?:\^|\*\*)\s*\{?\(?\s*(\d+)")
_POWER_OF_SUM = re.compile(r"\(([^()]*)\)\s*(?:\^|\*\*)\s*\{?\s*(\d{1,4})")
_MAX_TERMS = 200
_MAX_SUM_EXPONENT = 60
"""A bracket to a higher power is not expanded."""
_MAX_DEPTH = 8
_MIN_LONG_CHARS, _LONG_FACTOR = 150, 8
"""An answer that is longer than this, and this many times longer than the gold answer, is not a final answer but a
computation."""


def squeezed(text: str) -> str:
    """The text without spaces, except those between digits, without which two numbers would become one."""
    text = re.sub(r"\\[,;!]|^\$+|\$+$", "", text).strip()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _readable(text: str) -> str:
    """Write letters after a number as a product, because the parser would take them for a unit and drop them."""

    def product(found: re.Match[str]) -> str:
        return found[0] if quantities.is_unit(found[0]) or found[0] in _KEPT else r" \cdot ".join(found[0])

    return re.sub(r"(?<=\d)[a-zA-Z]{2,3}(?![a-zA-Z])", product, text)


def _is_set(text: str) -> bool:
    return bool(re.fullmatch(r"\$?\\\{.*\\\}\$?", text.strip(), re.DOTALL))


def _is_tuple(text: str) -> bool:
    return bool(re.fullmatch(r"\$?\([^()]*,[^()]*\)\$?", text.strip())) and "\\infty" not in text


def _are_equal_in_base(gold: str, answer: str) -> bool | None:
    """Compare digits in a stated base; None if neither side states one, or if the other side is not a plain sequence of
    digits."""
    one, other = notation.in_base(gold), notation.in_base(answer)
    if one is None and other is None:
        return None
    if one is not None and other is not None:
        return one == other
    digits, base = one or other or ("", "")
    plain = (answer if one is not None else gold).strip("$ ")
    if not plain.isalnum():
        return None
    return digits == plain.lower() and all(int(digit, 36) < int(base) for digit in digits)


def _contradicts_itself(answer: str, float_digits: int) -> bool:
    """Whether an answer is a false equation of numbers: `41 = 42`."""
    sides = [quantities.number_of(side) for side in answer.split("=")]
    known = [side for side in sides if side is not None]
    return len(known) > 1 and any(
        not quantities.are_equal_numbers(known[0].value, side.value, side.is_decimal, float_digits) for side in known
    )


def _has_several(gold: str) -> bool:
    """Whether the gold answer itself has several values: `1, 2`."""
    return "," in gold or "\\pm" in gold


def _are_exactly_equivalent(gold: str, answer: str, float_digits: int) -> bool:
    """Compare again with decimals as exact fractions and `i` as the imaginary unit; this can only add exact
    equalities.
    """
    fresh = [notation.with_exact_decimals(text) for text in (gold, answer)]
    if _IMAGINARY.search(gold + " " + answer):
        fresh = [_IMAGINARY.sub(r"\\sqrt{-1}", text) for text in fresh]
    return fresh != [gold, answer] and are_equivalent(fresh[0], fresh[1], float_digits)


def is_explosive(text: str) -> bool:
    """Whether evaluating a text may take unbounded time or memory: towers of powers, huge factorials, integrals.

    This only saves work, so that 9^9^9 does not cost a process; other expressions are ended by their deadline.
    """
    if (
        any(form.search(text) for form in (_FACTORIAL, _LIMITING, _NESTED))
        or re.search(r"\d{300}", text)
        or _depth(text) > _MAX_DEPTH
    ):
        return True
    for exponent, power, more in _TOWER.findall(text):
        if more or len(exponent) > 4 or len(power) > 4 or int(exponent) ** min(int(power), 12) > _MAX_EXPONENT:
            return True
    if any(int(exponent[:7]) > _MAX_SUM_EXPONENT for exponent in _SUM_POWER.findall(text)):
        return True
    for sum_, exponent in _POWER_OF_SUM.findall(text):
        num_terms = 1 + len(re.findall(r"[+-]", sum_[1:]))
        if math.comb(min(int(exponent), 100) + num_terms - 1, num_terms - 1) > _MAX_TERMS:
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
def parsed(text: str) -> tuple[Any, ...]:
    """What math-verify makes of a text: an expression, the text itself, or both; it may take unbounded time."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0)
    wrapped = text if re.match(r"^\$.*\$$", text, re.DOTALL) else f"${text}$"
    return tuple(parse(wrapped, extraction_config=[latex, ExprExtractionConfig()], parsing_timeout=None))


def are_equivalent(gold: str, answer: str, float_digits: int) -> bool:
    """math-verify's judgement of two LaTeX or plain expressions. It may take unbounded time; it never raises for odd
    input."""
    from math_verify import verify

    parsed_gold, parsed_answer = parsed(gold), parsed(answer)
    if not parsed_gold or not parsed_answer:
        return False
    return bool(verify(list(parsed_gold), list(parsed_answer), float_rounding=float_digits, timeout_seconds=None))
