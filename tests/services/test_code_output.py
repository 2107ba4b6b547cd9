"""Printed output against what was expected, and floats up to a tolerance."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from services.reward.judging.output import is_expected
from services.reward.judging.rewriting import are_close, with_tolerance


@pytest.mark.parametrize(
    ("printed", "expected", "modes"),
    [
        ("5\n", "5", {"tokens", "lines", "exact"}),
        ("5", "5\n", {"tokens", "lines", "exact"}),
        ("5 \n\n", "5\n", {"tokens", "lines"}),
        ("1 2\n", "1\n2\n", {"tokens"}),
        ("1  2", "1 2", {"tokens"}),
        ("1 2", "12", set()),
        ("5.0", "5", set()),
        ("YES", "Yes", set()),
        ("", "", {"tokens", "lines", "exact"}),
        ("5 5", "5", set()),
        ("a\r\nb\r\n", "a\nb", {"tokens", "lines"}),
    ],
)
def test_output_is_compared_as_asked(printed: str, expected: str, modes: set[str]) -> None:
    for mode in ("tokens", "lines", "exact"):
        assert is_expected(printed.encode(), expected, mode, 0.0) == (mode in modes), mode  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("printed", "expected", "is_close"),
    [
        ("0.3333333", "0.3333334", True),
        ("1e-7", "0", True),
        ("1000000.5", "1000000", True),
        ("1.1", "1", False),
        ("inf", "5", False),
        ("1e999", "5", False),
        ("nan", "5", False),
        ("nan", "nan", True),
        ("5_0", "50", False),
        ("\u0665", "5", False),
        ("0x5", "5", False),
        ("5.000000001 a", "5 a", True),
        ("5.000000001 a", "5 b", False),
        ("9" * 400, "5", False),
        ("5 5", "5", False),
        ("5", "5 5", False),
        ("5\n5", "5", False),
    ],
)
def test_numbers_may_differ_by_the_tolerance_and_nothing_else_may(printed: str, expected: str, is_close: bool) -> None:
    assert is_expected(printed.encode(), expected, "tokens", 1e-6) == is_close
    assert is_expected(printed.encode(), expected, "lines", 1e-6) == is_close


def test_bytes_that_are_no_text_equal_no_text() -> None:
    assert not is_expected(b"\xff", "\ufffd", "tokens", 0.0)


@pytest.mark.parametrize(
    ("left", "right", "is_close"),
    [
        (1.0000001, 1, True), (1.1, 1.0, False), ([1, 2.0000001], [1, 2.0], True), ((1,), [1], False),
        ({"a": 1.0000001}, {"a": 1.0}, True), ({"a": 1.0}, {"b": 1.0}, False), ("a", "a", True), (1, 2, False),
        (float("nan"), 1.0, False), (float("inf"), 1e300, False), (float("inf"), float("inf"), True),
        (None, 0.0, False), (True, 1.0000001, False),
    ],
)  # fmt: skip
def test_values_are_close_where_floats_are(left: Any, right: Any, is_close: bool) -> None:
    assert are_close(left, right, 1e-6) == is_close


def test_a_tolerance_reaches_every_equality_of_a_test() -> None:
    namespace: dict[str, Any] = {"x": 1.00000001}
    tree = with_tolerance(
        ast.parse("a = x == 1\nb = x != 1\nc = [x] == [1] and 1 == x\nd = 1 < x == 1"), namespace, 1e-6
    )
    exec(compile(tree, "test", "exec"), namespace)
    assert (namespace["a"], namespace["b"], namespace["c"]) == (True, False, True)
    assert namespace["d"] is False, "a chain is left as it is"
