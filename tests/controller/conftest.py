"""Makes the helpers in support/ importable by the tests of this folder, and hides the GPUs of the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True)
def hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device: auto` is `cpu` on every machine. Tests of GPUs replace the count themselves."""
    monkeypatch.setattr("controller.config.machine_gpus.usable_gpus", lambda: 0)


@pytest.fixture(autouse=True)
def start_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that are called in this process start no fork server before the run is known (test_early.py)."""
    monkeypatch.setattr("controller.launch.early.GPUS", (Path("/"),))
