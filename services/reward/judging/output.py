"""Compares the printed output of a program with the expected one."""

from __future__ import annotations

import re

from services.reward.judging.problem import Compare

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
MAX_NUMBER_CHARS = 60


def is_expected(printed: bytes, expected: str, compare: Compare, float_tolerance: float) -> bool:
    """Compare outputs. tokens: words separated by any white space; lines: without trailing white space and trailing
    empty lines; exact: byte by byte except for a final line break.

    With a tolerance, tokens that are both numbers in decimal notation may differ by it (relative above 1, measured by
    the expected number, so that a huge answer does not match everything).
    """
    text = printed.decode("utf-8", "surrogateescape")
    if compare == "exact":
        return _without_break(text) == _without_break(expected)
    if compare == "lines":
        given_lines, expected_lines = _lines(text), _lines(expected)
        if len(given_lines) != len(expected_lines):
            return False
        pairs = list(zip(given_lines, expected_lines, strict=True))
        if not float_tolerance:
            return all(given == wanted for given, wanted in pairs)
        return all(_are_tokens_equal(given.split(), wanted.split(), float_tolerance) for given, wanted in pairs)
    return _are_tokens_equal(text.split(), expected.split(), float_tolerance)


def _without_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _are_tokens_equal(given: list[str], expected: list[str], tolerance: float) -> bool:
    if len(given) != len(expected):
        return False
    if given == expected:
        return True
    pairs = zip(given, expected, strict=True)
    return tolerance > 0 and all(one == other or _are_close(one, other, tolerance) for one, other in pairs)


def _are_close(given: str, expected: str, tolerance: float) -> bool:
    if max(len(given), len(expected)) > MAX_NUMBER_CHARS or not (
        _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)
    ):
        return False
    number, wanted = float(given), float(expected)
    return abs(number - wanted) <= tolerance * max(1.0, abs(wanted))
