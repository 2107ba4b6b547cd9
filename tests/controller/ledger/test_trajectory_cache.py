"""The cache holds whole groups within its bound."""

from __future__ import annotations

from real_ledger import trajectory_of

from controller.ledger.trajectory_cache import TrajectoryCache, _size

SAMPLE = (trajectory_of([0, 0, 0]),)


def test_earliest_group_leaves_whole_when_the_bound_is_passed() -> None:
    cache = TrajectoryCache(3 * _size(SAMPLE[0]))
    for group_id, index in ((7, 0), (7, 1), (3, 0)):
        cache.add(group_id, index, SAMPLE)
    assert cache.get(7, 1) is SAMPLE
    cache.add(3, 1, SAMPLE)
    assert (cache.get(7, 0), cache.get(7, 1)) == (None, None)
    assert cache.get(3, 0) is SAMPLE


def test_forgotten_group_makes_room() -> None:
    cache = TrajectoryCache(2 * _size(SAMPLE[0]))
    cache.add(1, 0, SAMPLE)
    cache.add(2, 0, SAMPLE)
    cache.forget(1)
    cache.add(3, 0, SAMPLE)
    assert cache.get(2, 0) is SAMPLE
