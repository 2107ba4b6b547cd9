"""How long a process waits for its place on the cluster, and what is said about it; time is passed in."""

from __future__ import annotations

from controller.runtime.placement_waits import PlaceWaits


def test_wait_is_reported_once_and_so_is_its_end() -> None:
    waits = PlaceWaits(limit_s=600.0)
    assert waits.look("rollout-0", "a GPU", 100.0) == ""
    waits.look("rollout-0", "a GPU", 110.0)
    assert waits.take_news() == [], "a short wait is not worth a word"
    for _ in range(3):
        assert waits.look("rollout-0", "a GPU", 111.0) == ""
    assert waits.take_news() == ["rollout-0 waits for a GPU, at most 600 s (launch.ray.node_wait_s)"]
    assert waits.names == ["rollout-0"]
    waits.look("rollout-0", "", 200.0)
    assert waits.take_news() == ["rollout-0 is placed"]
    assert waits.names == waits.take_news() == []


def test_end_of_a_short_wait_is_not_reported() -> None:
    waits = PlaceWaits(limit_s=600.0)
    waits.look("rollout-0", "a GPU", 0.0)
    assert waits.look("rollout-0", "", 1.0) == ""
    assert waits.take_news() == []


def test_wait_beyond_the_limit_is_given_up_and_a_later_one_starts_from_zero() -> None:
    waits = PlaceWaits(limit_s=600.0)
    waits.look("rollout-0", "a GPU", 1000.0)
    assert waits.look("rollout-0", "a GPU", 1600.0) == ""
    assert waits.look("rollout-0", "a GPU", 1600.5) == "waited 600 s for a GPU (launch.ray.node_wait_s)"
    assert waits.names == []
    assert waits.look("rollout-0", "a GPU", 1700.0) == ""
    assert waits.names == ["rollout-0"]
