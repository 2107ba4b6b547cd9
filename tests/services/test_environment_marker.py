"""What one process writes into its marker, another one reads."""

from __future__ import annotations

import pytest

from services.environment.marker import NOBODY, Mark, Marker


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Marker, Marker]:
    """The writing end, and the reading one of the same page."""
    monkeypatch.setattr("time.monotonic", lambda: 7.5)
    writer, fd = Marker.make()
    return writer, Marker(fd)


def test_new_marker_shows_nobody_and_no_calls(ends: tuple[Marker, Marker]) -> None:
    assert ends[1].look() == Mark(NOBODY, 0.0, 0, 0, 0, 0)


def test_episode_is_shown_with_its_time_the_number_of_calls_and_the_memory_at_its_beginning(
    ends: tuple[Marker, Marker],
) -> None:
    writer, reader = ends
    writer.enter(3, 1000)
    assert reader.look() == Mark(3, 7.5, 1, 1000, 0, 0)
    writer.leave()
    assert reader.look() == Mark(NOBODY, 7.5, 1, 0, 0, 0)
    writer.enter(4, 2000)
    assert reader.look() == Mark(4, 7.5, 2, 2000, 0, 0)


def test_heaviest_episode_stays_shown_during_later_calls_and_never_weighs_less_than_nothing(
    ends: tuple[Marker, Marker],
) -> None:
    writer, reader = ends
    writer.heaviest(5, 300)
    writer.enter(6, 10)
    assert reader.look() == Mark(6, 7.5, 1, 10, 5, 300)
    writer.leave()
    writer.heaviest(7, -1)
    assert reader.look() == Mark(NOBODY, 7.5, 1, 0, 7, 0)


def test_moment_of_another_process_is_never_shown_with_the_episode_before(ends: tuple[Marker, Marker]) -> None:
    """Between two calls nobody is shown, so that a time is never read with the wrong episode."""
    writer, reader = ends
    shown: list[int] = []
    write = writer._write

    def watched(episode: int, used_bytes: int) -> None:
        write(episode, used_bytes)
        shown.append(reader.look().episode)

    writer._write = watched  # type: ignore[method-assign]
    writer.enter(1, 0)
    writer.enter(2, 0)
    assert shown == [NOBODY, 1, NOBODY, 2]
