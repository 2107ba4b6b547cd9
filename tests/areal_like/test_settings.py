"""What every settings class refuses."""

from __future__ import annotations

import math

import pydantic
import pytest

from areal_like.settings import Settings


class Some(Settings):
    rate: float = 1.0
    """Of something."""


def test_settings_never_change_once_they_are_made() -> None:
    some = Some(rate=2)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        some.rate = 3.0
    assert some.rate == 2.0


def test_unknown_keys_and_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="rat"):
        Some.model_validate({"rat": 1.0})
    for number in (math.nan, math.inf):
        with pytest.raises(pydantic.ValidationError, match="finite"):
            Some(rate=number)


def test_defaults_are_checked_too_and_a_field_is_described_by_the_text_below_it() -> None:
    class Wrong(Settings):
        rate: float = "fast"  # type: ignore[assignment]

    with pytest.raises(pydantic.ValidationError):
        Wrong()
    assert Some.model_fields["rate"].description == "Of something."
