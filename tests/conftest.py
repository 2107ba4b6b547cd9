"""What tests of several folders need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def published() -> Callable[[str], Path]:
    """`published("gsm8k/test.jsonl")`: a file of the published data sets; the test is skipped where it is not.

    They lie in the folder AREAL_LIKE_TEST_DATA, else beside the checkout.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("AREAL_LIKE_TEST_DATA", beside))

    def find(name: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(f"no published rows: set AREAL_LIKE_TEST_DATA to a folder with {name}")
        return folder / name

    return find
