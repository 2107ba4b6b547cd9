"""Claims about options of losses and advantages: each mistake is one fault with its key and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field, model_validator

from areal_like.errors import UserError
from areal_like.settings import Settings
from trainer.objectives.options import keywords, option_faults, option_values, options_of, options_of_function


class Section(Settings):
    """A section of the configuration with a key of its own."""

    bound: float = 3.0
    options: dict[str, Any] = Field(default_factory=dict)


class Model(Settings):
    """Options, one of which is a key of the section."""

    bound: float = Field(1.0, gt=0)
    low: float = Field(gt=0)
    high: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Model:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Nothing(Settings):
    """No options."""


def faults(options: dict[str, Any], *, bound: float = 3.0, model: type[Settings] = Model) -> list[tuple[str, str, str]]:
    keys = ("bound",) if model is Model else ()
    return [tuple(fault) for fault in option_faults(model, Section(bound=bound, options=options), "s", keys)]


def test_options_join_with_the_keys_of_their_section() -> None:
    section = Section(bound=4.0, options={"low": 1.0})
    assert option_values(section, ("bound",), section.options) == {"bound": 4.0, "low": 1.0}
    assert option_values(section, (), section.options) == {"low": 1.0}
    made = options_of(Model, section, "s", ("bound",))
    assert (made.bound, made.low, made.high) == (4.0, 1.0, 2.0)
    assert options_of(Model, section, "s").bound == 1.0
    assert faults({"low": 1.0}) == []


def test_each_mistake_is_a_fault_with_its_key_and_what_to_do() -> None:
    assert faults({"low": 1.0, "hihg": 1}) == [
        ("s.options.hihg", "there is no such option", "use one of the options low, high")
    ]
    assert faults({}) == [("s.options.low", "is required", "set it")]
    assert faults({"low": 1.0, "bound": 2.0}) == [
        ("s.options.bound", "is not an option: bound is a key of s", "set s.bound")
    ]
    assert faults({"low": 0.0}) == [
        ("s.options.low", "input should be greater than 0, not 0.0", "see docs/algorithms.md")
    ]
    assert faults({"low": 1.0, "high": -1}) == [
        ("s.options.high", "input should be greater than 0, not -1", "2.0 unless set")
    ]
    assert faults({"low": 1.0}, bound=0.0) == [("s.bound", "input should be greater than 0, not 0.0", "1.0 unless set")]
    assert faults({"low": 5.0}) == [("s.options", "low is above high", "see docs/algorithms.md")]
    assert [key for key, _, _ in faults({"low": 0, "high": 0, "x": 1})] == [
        "s.options.low",
        "s.options.high",
        "s.options.x",
    ]


def test_what_has_no_options_says_so() -> None:
    assert faults({"x": 1}, model=Nothing) == [
        ("s.options.x", "there is no such option", "remove this option; there are none")
    ]


def test_first_mistake_is_the_error() -> None:
    with pytest.raises(UserError) as raised:
        options_of(Model, Section(options={"low": 0, "x": 1}), "s", ("bound",))
    error = raised.value
    assert (error.where, error.remedy) == ("s.options.low", "see docs/algorithms.md")
    assert error.what == "input should be greater than 0, not 0"


# ---------------------------------------------------------------- of a function


def test_options_of_a_function_are_its_parameters_behind_the_inputs() -> None:
    def loss(current: Any, tokens: Any, scale: float, *, bound: float = 2.0, _private: int = 3) -> None: ...

    model = options_of_function(loss, 2)
    assert list(model.model_fields) == ["scale", "bound"]
    assert model.model_fields["scale"].is_required()
    assert keywords(model(scale=[1])) == {"scale": [1], "bound": 2.0}, "values are the function's own affair"
    with pytest.raises(ValueError, match="not permitted"):
        model(scale=1, other=2)
    assert list(options_of_function(loss, 1).model_fields) == ["tokens", "scale", "bound"]


def test_inputs_that_are_taken_together_hide_no_option() -> None:
    def loss(*inputs: Any, scale: float = 1.0) -> None: ...

    def any_loss(*inputs: Any, **more: Any) -> None: ...

    assert list(options_of_function(loss, 2).model_fields) == ["scale"]
    assert keywords(options_of_function(any_loss, 2)(scale=3)) == {"scale": 3}


def test_function_that_takes_any_keyword_takes_any_option() -> None:
    def loss(current: Any, tokens: Any, *args: Any, scale: float = 1.0, **more: Any) -> None: ...

    model = options_of_function(loss, 2)
    assert list(model.model_fields) == ["scale"]
    assert keywords(model(scale=2.0, model_size=3)) == {"scale": 2.0, "model_size": 3}


@pytest.mark.parametrize("function", [type, 3])
def test_function_whose_parameters_python_does_not_show_takes_any_option(function: Any) -> None:
    model = options_of_function(function, 2)
    assert keywords(model(anything=1)) == {"anything": 1}
    assert keywords(model()) == {}
