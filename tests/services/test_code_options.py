"""What scorer `code` does where nothing is said, and the least that each of its options may be."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.reward.code_options import CodeOptions


def test_defaults_judge_as_documented() -> None:
    assert CodeOptions().model_dump() == {
        "partial_credit": False,
        "compare": "tokens",
        "float_tolerance": 0.0,
        "extract": "auto",
        "must_stop": False,
        "own_classes": "weaker",
        "require": "landlock",
        "layer": None,
        "python": None,
        "time_limit_s": 4.0,
        "time_factor": 1.0,
        "total_limit_s": 8.0,
        "memory_limit_mb": 1024,
        "max_memory_limit_mb": 2048,
        "max_processes": 32,
        "max_output_kb": 4096,
        "max_file_mb": 16,
        "max_open_files": 64,
        "tmp_mb": 32,
        "max_program_chars": 1_000_000,
    }


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [
        ("float_tolerance", 0.0, -0.001),
        ("time_limit_s", 0.001, 0.0),
        ("time_factor", 0.001, 0.0),
        ("total_limit_s", 0.001, 0.0),
        ("memory_limit_mb", 16, 15),
        ("max_memory_limit_mb", 16, 15),
        ("max_processes", 1, 0),
        ("max_output_kb", 1, 0),
        ("max_file_mb", 0, -1),
        ("max_open_files", 16, 15),
        ("tmp_mb", 1, 0),
        ("max_program_chars", 1, 0),
    ],
)
def test_each_option_has_a_least_value(name: str, least: float, below: float) -> None:
    assert getattr(CodeOptions.model_validate({name: least}), name) == least
    with pytest.raises(ValidationError, match=name):
        CodeOptions.model_validate({name: below})


@pytest.mark.parametrize(("name", "most", "above"), [("float_tolerance", 0.999, 1.0), ("time_limit_s", 600.0, 600.1)])
def test_tolerance_stays_below_one_and_a_test_ends_within_ten_minutes(name: str, most: float, above: float) -> None:
    assert getattr(CodeOptions.model_validate({name: most}), name) == most
    with pytest.raises(ValidationError, match=name):
        CodeOptions.model_validate({name: above})
