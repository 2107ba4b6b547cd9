"""A run and the resources of its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from controller.runtime.open_session import OpenSession


def test_a_note_of_the_session_is_shown() -> None:
    shown: list[tuple[Any, ...]] = []
    session: Any = SimpleNamespace(telemetry=SimpleNamespace(display=SimpleNamespace(note=lambda *a: shown.append(a))))
    OpenSession.note(session, "disk is slow", "warning")
    OpenSession.note(session, "ready")
    assert shown == [("disk is slow", "warning"), ("ready", "info")]
