"""What every settings class refuses."""

from __future__ import annotations

import math

import pydantic
import pytest

from areal_like.settings import Settings, field_docstrings


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


def test_defaults_are_checked_too() -> None:
    class Wrong(Settings):
        rate: float = "fast"  # type: ignore[assignment]

    with pytest.raises(pydantic.ValidationError):
        Wrong()


def test_a_field_is_described_by_the_text_below_it_and_by_that_of_its_parents() -> None:
    class More(Some):
        count: int = 1
        """How
        many."""
        plain: int = 2

    assert field_docstrings(Some) == {"rate": "Of something."}
    assert field_docstrings(More) == {"rate": "Of something.", "count": "How many."}


def test_a_field_of_a_class_without_source_has_no_description() -> None:
    made = pydantic.create_model("made", __base__=Settings, rate=(float, 1.0))
    assert field_docstrings(made) == {}


def test_making_a_settings_class_reads_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("getsource", "getsourcelines", "findsource"):
        monkeypatch.setattr(f"inspect.{name}", lambda *_: pytest.fail("read the source"))

    class Quick(Settings):
        rate: float = 1.0
        """Of something."""

    assert Quick().rate == 1.0
