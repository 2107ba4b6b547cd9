"""What is said when a user's code takes long to be imported."""

from __future__ import annotations

import pytest

from areal_like.slow import print_slow


def test_a_slow_import_is_named_with_its_time_and_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    print_slow("importing mine:score", 5.0, 60.0)
    assert capsys.readouterr().err == "importing mine:score has taken 5 s so far; it is abandoned after 60 s\n"
