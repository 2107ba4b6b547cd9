"""What a quarantine remembers: bounded, and by what a row holds."""

from __future__ import annotations

import pytest

from services.environment import quarantine as module
from services.environment.config import EnvironmentSettings
from services.environment.quarantine import Quarantine


def test_rows_are_distinguished_by_their_content_and_the_oldest_hangs_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    held = Quarantine(EnvironmentSettings(kind="guess_number", max_hangs=1), lambda: 0.0)
    first = {"a": 1, "b": [2.5, None, b"x"]}
    assert held.hung(first)
    assert held.reason({"b": [2.5, None, b"x"], "a": 1})
    assert not held.reason({"a": 1})
    held.hung({"n": 1})
    held.hung({"n": 2})
    assert not held.reason(first)
    assert held.reason({"n": 1})
    assert held.reason({"n": 2})
