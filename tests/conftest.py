"""What tests of several folders need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the suite, and of processes it starts, are registered in a folder of its own, not in the user's."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


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
