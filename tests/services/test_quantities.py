"""Numbers, units and times as people write them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from services.reward.scorers.notation import choice_of, in_base, is_hedged, normal
from services.reward.scorers.quantities import are_equal, are_equal_times, number_of, quantity_of, time_of_day
from services.reward.scorers.regions import as_interval


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", "7"),
        ("-7", "-7"),
        ("+7", "7"),
        ("- 7", "-7"),
        ("007", "7"),
        ("7.", "7"),
        (".5", "1/2"),
        ("1,234.5", "2469/2"),
        ("1 234 567", "1234567"),
        ("3/4", "3/4"),
        ("-3/4", "-3/4"),
        ("3/-4", "-3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"\dfrac34", "3/4"),
        (r"-\frac{3}{4}", "-3/4"),
        (r"\frac{-3}{4}", "-3/4"),
        (r"2\frac{3}{4}", "11/4"),
        (r"-1\frac12", "-3/2"),
        ("2 3/4", "11/4"),
        ("1e5", "100000"),
        (r"1.5 \times 10^{3}", "1500"),
        ("10^{-3}", "1/1000"),
        (r"3 \cdot 10^5", "300000"),
        (r"0.\overline{6}", "2/3"),
        (r"0.1\overline{36}", "3/22"),
        ("{7}", "7"),
        ("(7)", "7"),
        ("$7$", "7"),
    ],
)
def test_numbers_in_every_form_are_exact(text: str, value: str) -> None:
    number = number_of(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        ".",
        "3x",
        "5 million",
        "50%",
        "1,23",
        "1234,567",
        "1.2.3",
        "4 2",
        "3 4/",
        "3/0",
        r"\frac{1}{0}",
        "٧",
        "1e999",
        "1" * 200,
        "9**9",
        "2^{10}",
        "(1)(2)",
        "1e",
        "--5",
        "0x10",
        "1_000",
    ],
)
def test_what_is_no_plain_number_is_none(text: str) -> None:
    assert number_of(text) is None


SAME = [
    ("5 cm", r"5\text{cm}"),
    ("5 cm", r"0.05 \text{ m}"),
    ("36 cm^2", r"36 \text{ square centimeters}"),
    ("1 m^2", "10000 cm^2"),
    ("9 ft^2", "1 square yard"),
    (r"60 \text{ mph}", "60 miles per hour"),
    (r"18 \text{ m/s}", r"18\,\frac{\text{m}}{\text{s}}"),
    ("90 minutes", "1.5 hours"),
    ("3 hours and 20 minutes", "200 minutes"),
    ("4 ft 3 in", r"51 \text{ inches}"),
    (r"\$1,250.50", "1250.5 dollars"),
    (r"\$0.75", "75 cents"),
    ("25", "£25"),
    ("25", "€25.00"),
    (r"\$1.2 \text{ million}", "1200000"),
    ("2 dozen", "24"),
    (r"12.5\%", "1/8"),
    (r"12.5\%", "12.5"),
    ("0.2", "20 percent"),
    ("45^\\circ", "45 degrees"),
    (r"25^\circ\text{C}", "25^\\circ C"),
    ("72", "72 dogs"),
    ("72", r"72 \text{ red apples}"),
    ("3 kg", "3,000 g"),
    ("5 m", "5"),
    ("5", "5 m"),
]
DIFFERENT = [
    ("5 cm", "5 m"),
    ("5 cm", "5 cm^2"),
    ("60 mph", "60 km/h"),
    ("5 hours", "5 minutes"),
    (r"\$25", "€25"),
    (r"\$3.50", "3.5 cents"),
    (r"12.5\%", "1.25"),
    ("20", "0.2"),
    ("20", r"0.2\%"),
    (r"45^\circ", "45 radians"),
    (r"25^\circ\text{C}", r"25^\circ\text{F}"),
    ("5", "5 million"),
    ("12", "12 dozen"),
    ("0.0000005", "0.0000004"),
    ("1/3", "0.333"),
    ("3", "3.0001"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_the_same_quantity_in_other_words_is_equal(gold: str, answer: str) -> None:
    one, other = quantity_of(normal(gold)), quantity_of(normal(answer))
    assert one is not None
    assert other is not None
    assert are_equal(one, other, 6)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_another_quantity_is_not(gold: str, answer: str) -> None:
    one, other = quantity_of(normal(gold)), quantity_of(normal(answer))
    assert one is not None
    assert other is not None
    assert not are_equal(one, other, 6)


@pytest.mark.parametrize(
    "text",
    [
        "42x",
        "3i",
        "5 x",
        "42 or 43",
        "42 is wrong",
        "42 to 43",
        "half",
        "42 pi",
        "42 if 1 else 0",
        r"42 \text{ xor } 41",
    ],
)
def test_what_changes_a_number_is_no_unit(text: str) -> None:
    assert quantity_of(normal(text)) is None


@pytest.mark.parametrize(
    ("gold", "answer", "is_same"),
    [
        ("3:45", r"\text{3:45}", True),
        ("3:45", "3:45 pm", True),
        ("2:30 p.m.", "14:30", True),
        ("2:30 PM", "2:30 AM", False),
        ("12:00 am", "0:00", True),
        ("5 pm", "5:00 p.m.", True),
        ("3:45", "3:54", False),
        (r"8\!:\!34 \text{ p.m.}", "20:34", True),
    ],
)
def test_times_of_day(gold: str, answer: str, is_same: bool) -> None:
    one, other = time_of_day(normal(gold)), time_of_day(normal(answer))
    assert one is not None
    assert other is not None
    assert are_equal_times(one, other) == is_same


@pytest.mark.parametrize("text", ["3:4", "3:75", "25:00", "13:00 pm", "3.45", "1:2:3"])
def test_what_is_no_time_of_day(text: str) -> None:
    assert time_of_day(text) is None


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        (r"x \le 3", r"(-\infty, 3]"),
        ("5<x", r"(5, \infty)"),
        (r"0 \le x \le 1", "[0, 1]"),
        ("7>x>-3", "(-3, 7)"),
        (r"x<2 \text{ or } x>3", r"(-\infty, 2) \cup (3, \infty)"),
        (r"x \ne 2", r"(-\infty, 2) \cup (2, \infty)"),
        (r"\{x \mid 0 \le x \le 1\}", "[0, 1]"),
        (r"x \in [0,1)", "[0,1)"),
        (r"\mathbb{R}", r"(-\infty, \infty)"),
        (r"\{ x \in \mathbb{R} : x > 1 \}", r"(1, \infty)"),
        ("1 < x > 2", "1 < x > 2"),
        ("a < b < c < d", "a < b < c < d"),
        ("x+y<3", "x+y<3"),
        ("7", "7"),
    ],
)
def test_inequalities_are_intervals(text: str, interval: str) -> None:
    assert as_interval(normal(text)) == interval


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("(b)", "B"),
        (r"\text{(B)}", "B"),
        ("B)", "B"),
        (r"\text{(B) } 12", "B"),
        ("Option C", "C"),
        ("b", ""),
        ("AB", ""),
        ("A, B", ""),
        ("(A) or (B)", ""),
        ("(A)(B)", ""),
        ("x", ""),
        ("B+1", ""),
        ("Bob", ""),
        ("12", ""),
    ],
)
def test_a_choice_is_one_letter_in_any_dress(text: str, choice: str) -> None:
    assert choice_of(text)[0] == choice


def test_digits_in_a_base() -> None:
    assert in_base("1011_2") == in_base(r"1011_{\text{two}}") == ("1011", "2")
    assert in_base("2A_{16}") == ("2a", "16")
    assert [in_base(text) for text in ("x_2", "1011", "a_n", "ab_2")] == [None] * 4


@pytest.mark.parametrize("text", ["5 or 6", "5?", r"5 \mid 6", "5|6", r"5\\6", "not 5", r"5 \lor 6", "either 5"])
def test_alternatives_and_doubts_are_hedges(text: str) -> None:
    assert is_hedged(text)


@pytest.mark.parametrize(
    "text", ["5", "|x|", r"\{x \mid x > 0\}", "more", r"\text{for all}", r"\begin{pmatrix}1\\2\end{pmatrix}"]
)
def test_other_answers_are_not(text: str) -> None:
    assert not is_hedged(text)


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("$5", "money", 5), ("$5 million", "money", 5_000_000), ("5 million", "", 5_000_000),
        ("$5 dollars", "money", 5),
        ("$5 km", "length", 5), ("5 km", "length", 5), ("$-5", "money", -5), ("-$5", "money", -5),
    ],
)  # fmt: skip
def test_sign_of_a_currency_makes_money_of_a_number_and_of_no_other_unit(text: str, dimension: str, value: int) -> None:
    quantity = quantity_of(text)
    assert quantity is not None
    assert (quantity.dimension, quantity.number.value) == (dimension, value)
