"""Limits of numbers, units and times: how large, how near, which words."""

from __future__ import annotations

from fractions import Fraction

import pytest

from services.reward.scorers.quantities import (
    Number,
    Quantity,
    are_equal,
    are_equal_numbers,
    is_qualified,
    is_unit,
    number_of,
    quantity_of,
    time_of_day,
    without_formatting,
)


def in_own_unit(text: str) -> tuple[Fraction, str]:
    quantity = quantity_of(text)
    assert quantity is not None
    return quantity.number.value * quantity.factor, quantity.dimension


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "is_decimal"),
    [
        ("7", False),
        ("7.", True),
        ("7.0", True),
        ("1/2", False),
        (r"0.\overline{6}", False),
        ("1e5", False),
        ("1.0e5", True),
    ],
)
def test_number_knows_whether_it_was_written_as_a_decimal(text: str, is_decimal: bool) -> None:
    number = number_of(text)
    assert number is not None
    assert number.is_decimal == is_decimal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0." + "0" * 117 + "7", Fraction(7, 10**118)),
        ("1e300", Fraction(10) ** 300),
        ("1e-300", Fraction(10) ** -300),
        ("10^{300}", Fraction(10) ** 300),
        (r"-0.\overline{3}", Fraction(-1, 3)),
        (r"2.5\overline{0}", Fraction(5, 2)),
        (r".\overline{12}", Fraction(12, 99)),
        (r"1.\bar{6}", Fraction(5, 3)),
        ("0/5", Fraction(0)),
        ("$ 7 $", Fraction(7)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"10 \times 10^{-2}", Fraction(1, 10)),
    ],
)
def test_number_is_exact_up_to_the_bounds(text: str, value: Fraction) -> None:
    number = number_of(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text", ["1" * 121, "1e302", "10^{302}", "1e-302", "(7", "7)", "((7)(8))", "$", "$$", "{}", "1/0", "3 0/0"]
)
def test_what_is_beyond_the_bounds_or_half_is_no_number(text: str) -> None:
    assert number_of(text) is None


# ---------------------------------------------------------------- words and units


@pytest.mark.parametrize(
    ("word", "factor"),
    [
        ("hundred", 100),
        ("thousand", 1000),
        ("million", 10**6),
        ("billion", 10**9),
        ("trillion", 10**12),
        ("dozen", 12),
    ],
)
def test_words_for_numbers_multiply(word: str, factor: int) -> None:
    assert in_own_unit(f"3 {word}") == (3 * factor, "")
    assert in_own_unit(f"3 {word} dollars") == (3 * factor, "money")
    assert in_own_unit(f"3 {word} eggs") == (3 * factor, "")
    assert in_own_unit(f"2 {word} thousand") == (2 * factor * 1000, "")
    assert quantity_of(f"3 {word} or more") is None


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("5 square meters", 5, "length^2"),
        ("5 sq. ft", 5 * Fraction(381, 1250) ** 2, "length^2"),
        ("5 cubic meters", 5, "length^3"),
        ("5 cu ft", 5 * Fraction(381, 1250) ** 3, "length^3"),
        ("5 meters squared", 5, "length^2"),
        ("5 meters cubed", 5, "length^3"),
        ("5 cm^2", Fraction(5, 10**4), "length^2"),
        ("5 cm^{3}", Fraction(5, 10**6), "length^3"),
        ("5 km/h", Fraction(5000, 3600), "length/time"),
        ("5 miles per hour", 5 * Fraction(201168, 125) / 3600, "length/time"),
        ("5 mph", 5 * Fraction(201168, 125) / 3600, "length/time"),
        ("5 kph", Fraction(5000, 3600), "length/time"),
        ("5 kmh", Fraction(5000, 3600), "length/time"),
        ("5 mps", 5, "length/time"),
        ("5 fps", 5 * Fraction(381, 1250), "length/time"),
        ("5 dollars per hour", Fraction(5, 3600), "money/time"),
        ("5 degrees C", 5, "celsius"),
        ("5 degrees Fahrenheit", 5, "fahrenheit"),
        ("5 degrees", 5, "angle in degrees"),
        ("5 inches", Fraction(127, 1000), "length"),
        ("5 hrs", 18000, "time"),
        ("5 oz", 5, "weight"),
    ],
)
def test_unit_has_its_dimension_and_its_size(text: str, value: Fraction | int, dimension: str) -> None:
    assert in_own_unit(text) == (value, dimension)


def test_units_are_known_by_their_names_in_any_case_and_number_and_s_alone_is_the_second() -> None:
    assert all(is_unit(word) for word in ("cm", "CM", "inches", "Hours", "s", "kilograms", "m"))
    assert not any(is_unit(word) for word in ("apples", "x", "es", "ss", "metrics", ""))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 hour 30 minutes", 5400),
        ("1 h, 30 min & 5 s", 5405),
        ("2 days and 1 hour", 176_400),
        ("1 week 1 day", 691_200),
    ],
)
def test_parts_of_one_dimension_add_up(text: str, value: int) -> None:
    quantity = quantity_of(text)
    assert quantity is not None
    assert (quantity.number, quantity.dimension, quantity.is_compound) == (Number(Fraction(value), False), "time", True)


@pytest.mark.parametrize("text", ["30 minutes 1 hour", "1 hour 2 hours", "1 hour 3 cm", "1 hour 3 apples"])
def test_parts_in_another_order_or_of_other_dimensions_are_no_sum(text: str) -> None:
    quantity = quantity_of(text)
    assert quantity is None or not quantity.is_compound


@pytest.mark.parametrize("text", ["5%", r"5\%", "5 percent", "5 per cent", "5 pct.", "5 Percent"])
def test_percent_is_known_in_its_ways_of_writing(text: str) -> None:
    quantity = quantity_of(text)
    assert quantity is not None
    assert (quantity.is_percent, quantity.dimension) == (True, "")


@pytest.mark.parametrize(
    ("text", "is_none"),
    [
        ("5 red apples of the tree there", False),
        ("5 red apples of the old tree there", True),
        ("5apples", True),
        ("5 a", True),
        ("5 ab", False),
        ("5 apples or pears", True),
        ("5 pi", True),
        ("5 maybe", True),
    ],
)
def test_few_words_behind_a_number_are_what_it_counts(text: str, is_none: bool) -> None:
    assert (quantity_of(text) is None) == is_none


@pytest.mark.parametrize(
    ("text", "is_another"),
    [
        ("8 less than 10", True),
        ("8 is wrong", True),
        ("8 if x > 0", True),
        ("8 Except 9", True),
        ("8 apples", False),
        ("8", False),
        ("less than 8", False),
        (r"8 \text{ when } x", True),
    ],
)
def test_words_that_make_a_number_another_are_noticed_right_behind_it(text: str, is_another: bool) -> None:
    assert is_qualified(text) == is_another


def test_dress_of_words_and_kinds_of_space_are_taken_off() -> None:
    assert without_formatting(r"5\,\text{km}\quad per~\mathrm{h}").split() == ["5", "km", "per", "h"]
    assert without_formatting(r"\text{a \textbf{b} c}").split() == ["a", "b", "c"]


# ---------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("gold", "number", "digits", "is_equal"),
    [
        ("2", "2.04", 1, True),
        ("2", "2.05", 1, False),
        ("2", "1.96", 1, True),
        ("2", "1.95", 1, False),
        ("0.2", "0.209", 1, True),
        ("0.2", "0.21", 1, False),
        ("0", "0.04", 1, True),
        ("0", "0.05", 1, False),
        ("-0.2", "-0.209", 1, True),
        ("-0.2", "0.2", 1, False),
        ("200", "200.04", 1, True),
        ("200", "200.05", 1, False),
    ],
)
def test_decimals_are_equal_within_half_a_unit_of_the_last_place_that_counts(
    gold: str, number: str, digits: int, is_equal: bool
) -> None:
    assert are_equal_numbers(Fraction(gold), Fraction(number), True, digits) == is_equal
    assert are_equal_numbers(Fraction(gold), Fraction(number), False, digits) == (gold == number)


def quantity(value: str, **facts: object) -> Quantity:
    return Quantity(Number(Fraction(value), False), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gold", "answer", "is_equal"),
    [
        (quantity("20", is_percent=True), quantity("1/5"), True),
        (quantity("1/5"), quantity("20", is_percent=True), True),
        (quantity("20", is_percent=True), quantity("20"), True),
        (quantity("20"), quantity("20", is_percent=True), True),
        (quantity("20", is_percent=True), quantity("20", is_percent=True), True),
        (quantity("20", is_percent=True), quantity("1/5", is_percent=True), False),
        (quantity("1/5"), quantity("20"), False),
        (quantity("1/5", is_percent=True), quantity("20"), False),
        (quantity("20"), quantity("1/5", is_percent=True), False),
        (quantity("5", dimension="length"), quantity("5"), True),
        (quantity("5"), quantity("5", dimension="length"), True),
        (quantity("5", dimension="length"), quantity("5", dimension="mass"), False),
        (quantity("5", dimension="length", factor=Fraction(100)), quantity("500", dimension="length"), True),
        (quantity("5", dimension="length", factor=Fraction(100)), quantity("5", dimension="length"), False),
        (quantity("90", is_compound=True), quantity("90"), False),
        (quantity("90"), quantity("90", is_compound=True), False),
        (quantity("90", dimension="time", is_compound=True), quantity("90", dimension="time"), True),
    ],
)
def test_quantities_are_the_same_by_number_percent_and_unit(gold: Quantity, answer: Quantity, is_equal: bool) -> None:
    assert are_equal(gold, answer, 3) == is_equal


def test_one_decimal_makes_the_comparison_of_both_one_of_decimals() -> None:
    exact, near = Number(Fraction(1, 3), False), Number(Fraction("0.3333"), True)
    for gold, answer in ((exact, near), (near, exact)):
        assert are_equal(Quantity(gold), Quantity(answer), 3)
    assert not are_equal(Quantity(exact), Quantity(Number(near.value, False)), 3)


# ---------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("0:00", (0, 0, 0, "")),
        ("24:59", (24, 59, 0, "")),
        ("23:59:59", (23, 59, 59, "")),
        ("12:00 pm", (12, 0, 0, "p")),
        ("12 am", (12, 0, 0, "a")),
        ("5 P.M.", (5, 0, 0, "p")),
        ("3 : 45", (3, 45, 0, "")),
        ("3{:}45", (3, 45, 0, "")),
        ("25:00", None),
        ("3:60", None),
        ("3:45:60", None),
        ("13 pm", None),
        ("13:00 am", None),
        ("5", None),
        ("", None),
    ],
)
def test_time_of_day_is_within_a_day(text: str, time: tuple[int, int, int, str] | None) -> None:
    assert time_of_day(text) == time


@pytest.mark.parametrize("text", ["(15", "15)", "{15", "15}", "(1)5", "1(5)"])
def test_a_bracket_at_one_end_is_no_bracket_around_a_number(text: str) -> None:
    assert number_of(text) is None
    assert quantity_of(text) is None


@pytest.mark.parametrize("text", [r"\text{5 cm}", r"\mathrm{5}\text{ cm}", r"\text{ }5 cm", "(5 cm)"])
def test_a_quantity_may_begin_in_the_dress_of_words(text: str) -> None:
    assert in_own_unit(text) == (Fraction(1, 20), "length")
