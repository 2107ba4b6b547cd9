r"""Finds the final answer: in a model's response, and in the columns of the usual data sets.

Equivalence of answers is in maths.py.

A response is read from its end: the last complete `\boxed{...}` (adjacent boxes are one answer of several values, so
boxing every candidate is not correct); else the text after the last `####` or `answer is`; else the last number. Only
the first rule that finds something counts, so a correct number among other candidates is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal_like.tasks.boxed import final_boxes, last_boxed
from services.reward.scorer_options import ALL_RULES as ALL_RULES
from services.reward.scorer_options import Rule

GOLD_FIELDS = ("answer", "final_answer", "gold", "solution")
"""Columns searched for the gold answer, in this order."""

_MARKER = re.compile(
    r"####|answer\s*(?:is|:|=)\s*:?|(?:option|choice)\s+is\s*:?(?=[\s*\\$({]*[A-J](?![a-zA-Z]))", re.IGNORECASE
)
_FILLER = re.compile(
    r"(?:(?:therefore|thus|hence|indeed|simply|just|exactly|clearly|then|now|equal to|given by|option|choice)[\s,:]+)+",
    re.I,
)
_ASIDE = re.compile(r"(?<=[\w$])\s*\([a-zA-Z][^()\d]*\)$")
"""Words in brackets after an answer: `42 (forty-two)`."""
_MORE = re.compile(
    r"[\s$]*[,;]\s*[$-]*\d|[\s$]*,?\s*(?:(?:x?or|maybe|perhaps|possibly|to|vs)\b|and\s+\$?\d|\?)", re.IGNORECASE
)
"""Text after a number which shows that it is not the only candidate."""
_DENIED = re.compile(r"(?:\bnot|n't|\bnever|\brather than|\binstead of|\bunlike|\bexcept)[\w\s$]{0,12}$", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|(?<![\w.])-?\.\d+")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_LEADING_NUMBER = re.compile(rf"[$€£]?\s*({_NUMBER.pattern})(?=[\s,;]|$)")
_ALTERNATIVE = re.compile(
    rf"(?:{_NUMBER.pattern})[\w\s$]{{0,20}}?,?\s*(?:\bor\b|\|\|?|\?)\s*(?:maybe|perhaps|possibly|even)?[\s$]*$",
    re.IGNORECASE,
)
_END_OF_SENTENCE = re.compile(r"\.(?:\s|$)")


def after_marker(text: str) -> str | None:
    """The rest of the line (and sentence) after the last `####`, `answer is` or `answer:`; None if there is none."""
    last = None
    for last in _MARKER.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    if last is None:
        return None
    rest = text[last.end() :].strip()
    line = rest.splitlines()[0].strip() if rest else ""
    formula = _FORMULA.search(line)
    if formula is not None:
        return next(filter(None, formula.groups())).strip() or None
    if "\\" not in line:  # a full stop inside a formula does not end a sentence
        line = _END_OF_SENTENCE.split(line, maxsplit=1)[0].strip(" .*:_`,!")
        line = _ASIDE.sub("", _FILLER.sub("", line, count=1) if _FILLER.match(line) else line)
        number = _LEADING_NUMBER.match(line)
        if number is not None and _MORE.match(line, number.end()):
            return line
        if number is not None and "percent" not in line and not re.match(r"\s*[-+*/^=]", line[number.end() :]):
            return line if len(line.split()) <= 3 else number.group(1)
    return line.strip(" .*:_`") or None


def last_number(text: str) -> str | None:
    """The last number of the text (thousands commas, decimals and simple fractions included), or None.

    None also if it is one of several candidates (`41 or 42`), or negated (`not 42`).
    """
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    before = text[max(0, found.start() - 60) : found.start()] if found is not None else ""
    if found is None or _ALTERNATIVE.search(before) or _DENIED.search(before):
        return None
    return found.group()


def boxed(text: str) -> str | None:
    """Content of the final box; of several adjacent ones, all contents as a list. None if there is none."""
    contents = list(dict.fromkeys(final_boxes(text)))
    return ", ".join(contents) if contents else None


def boxes_side_by_side(text: str) -> list[str]:
    """Contents of the final boxes if there are several, each once."""
    contents = list(dict.fromkeys(final_boxes(text)))
    return contents if len(contents) > 1 else []


_RULES = {"boxed": boxed, "marker": after_marker, "last_number": last_number}


def of_response(
    response: str, rules: tuple[Rule, ...] = ALL_RULES, pattern: re.Pattern[str] | None = None
) -> str | None:
    """The final answer of a response, or None if no rule finds one.

    pattern: regular expression of the rule `pattern`; the answer is the first group of its last match, or all of it
    without groups.
    """
    for rule in rules:
        if rule == "pattern":
            matches = list(pattern.finditer(response)) if pattern is not None else []
            found = matches[-1].group(min(1, matches[-1].re.groups)) if matches else None
        else:
            found = _RULES[rule](response)
        if found and found.strip():
            return found.strip()
    return None


def of_row(row: Mapping[str, Any], field: str | None = None) -> str | None:
    r"""The gold answer of a data row: GSM8K's `answer` with `####`, MATH's `answer` or `solution` with `\boxed`.

    If a solution ends with several adjacent boxes, all of them are the answer. None if no field has one. field: search
    only this one.
    """
    for name in (field,) if field else GOLD_FIELDS:
        value = row.get(name)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            continue
        if "####" in value:
            return after_marker(value)
        if last_boxed(value):
            return boxed(value)
        if name != "solution":
            return value.strip()
    return None
