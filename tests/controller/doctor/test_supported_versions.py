"""Which versions of Python and torch are supported, and what is said of others."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from controller.doctor.supported_versions import PYTHON_RANGE, TORCH_RANGE, _installed, python_fault, torch_fault

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_ranges_are_those_that_the_package_declares() -> None:
    text = PROJECT.read_text()
    for (low, high), pattern in ((PYTHON_RANGE, r'requires-python = "([^"]+)"'), (TORCH_RANGE, r'"torch([^"]+)"')):
        found = re.search(pattern, text)
        assert found is not None
        assert found[1] == f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"


@pytest.mark.parametrize(
    ("found", "is_supported"),
    [
        ((3, 11, 0), True),
        ((3, 13, 99), True),
        ((3, 12), True),
        ((3, 10, 99), False),
        ((3, 14, 0), False),
        ((4, 0), False),
    ],
)
def test_python_is_supported_from_the_first_to_the_last_minor_version(
    found: tuple[int, ...], is_supported: bool
) -> None:
    fault = python_fault(found)
    assert (fault == "") is is_supported
    if not is_supported:
        words = f"areal_like runs on Python 3.11 to 3.13, but this is Python {found[0]}.{found[1]} ({sys.executable})"
        assert fault == words


@pytest.mark.parametrize(
    ("found", "is_supported"),
    [("2.11.0", True), ("2.15.9+cu128", True), ("2.12", True), ("2.10.9", False), ("2.16.0", False), ("3.11", False)],
)
def test_torch_is_supported_whatever_it_was_built_for(found: str, is_supported: bool) -> None:
    fault = torch_fault(found)
    assert (fault == "") is is_supported
    if not is_supported:
        assert fault == f"areal_like runs on torch 2.11 to 2.15, but torch {found} is installed ({sys.executable})"


def test_torch_that_is_absent_or_has_an_odd_version_is_a_fault() -> None:
    assert torch_fault(None) == f"areal_like runs on torch 2.11 to 2.15, but torch is not installed ({sys.executable})"
    assert (
        torch_fault("nightly")
        == "areal_like runs on torch 2.11 to 2.15, but the version of the installed torch is nightly"
    )


def test_version_is_read_without_importing_the_package() -> None:
    assert _installed("pytest") == version("pytest")
    assert _installed("no-such-package-at-all") is None
