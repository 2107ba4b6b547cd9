"""Packages that cannot share an environment with this program, for tests: tests/fixtures/ecosystem/build.py installs
them."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def interpreter_of(name: str) -> str:
    """The interpreter of an environment; skips the test where there is none."""
    path = REPOSITORY / ".venv-ecosystem" / name / "bin" / "python"
    if not path.exists():
        pytest.skip(f"there is no {path.relative_to(REPOSITORY)}: make ecosystem")
    return str(path)
