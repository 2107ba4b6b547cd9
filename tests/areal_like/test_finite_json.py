"""JSON without numbers that are none."""

from __future__ import annotations

import pytest

from areal_like.finite_json import NotFinite, loads_finite


@pytest.mark.parametrize("text", ["[NaN]", '{"a": Infinity}', "-Infinity"])
def test_words_that_are_no_json_are_refused_by_name(text: str) -> None:
    name = text.strip("[]").rpartition(" ")[2].strip("}")
    with pytest.raises(NotFinite, match=f"contains {name}, which is not JSON"):
        loads_finite(text)


def test_a_number_beyond_all_floats_is_refused_by_its_first_digits() -> None:
    with pytest.raises(NotFinite, match="contains 1e999, which is beyond the range of a floating-point number"):
        loads_finite("[1e999]")
    with pytest.raises(NotFinite, match=f"contains {'9' * 40}, which"):
        loads_finite("9" * 400 + ".0")


def test_all_other_json_is_read() -> None:
    assert loads_finite(b'{"a": [1.5, -2e3, null, "NaN"], "b": 12345678901234567890}') == {
        "a": [1.5, -2000.0, None, "NaN"], "b": 12345678901234567890,
    }  # fmt: skip
    assert loads_finite("[7]", parse_int=str) == ["7"]
