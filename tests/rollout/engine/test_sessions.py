"""Which conversations are kept between turns, and how much of one a request may go on from."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.adapter_layout import BASE
from rollout.engine.sessions import KeptRow, Sessions


def own(key: int) -> tuple[int, int]:
    """Key of a conversation without an adapter."""
    return key, BASE


def put(sessions: Sessions, key: int, *tokens: int, adapter: int = BASE) -> bool:
    if not sessions.make_room((key, adapter), len(tokens)):
        return False
    sessions.keep((key, adapter), KeptRow(np.array(tokens, np.int32), f"row of {key}", len(tokens)))
    return True


@pytest.mark.parametrize(
    ("asked", "num_common"),
    [((1, 2, 3, 4), 3), ((1, 2, 3), 3), ((1, 2), 2), ((1, 2, 9, 3), 2), ((9, 2, 3), None), ((), None)],
)
def test_a_request_goes_on_from_the_longest_common_beginning(asked: tuple[int, ...], num_common: int | None) -> None:
    sessions = Sessions(10)
    put(sessions, 5, 1, 2, 3)
    found = sessions.take(own(5), np.array(asked, np.int32))
    assert (found is None) if num_common is None else (found is not None and found[1] == num_common)
    assert (len(sessions), sessions.num_bytes) == (0, 0)
    assert sessions.take(own(5), np.array(asked, np.int32)) is None


def test_the_least_recently_used_leave_when_there_is_no_room() -> None:
    sessions = Sessions(6)
    for key in (1, 2, 3):
        put(sessions, key, 0, 0)
    put(sessions, 1, 0, 0, 0)  # replaces its own entry, and needs one more byte
    assert sessions.take(own(2), np.zeros(2, np.int32)) is None
    assert (len(sessions), sessions.num_bytes, sessions.num_evicted) == (2, 5, 1)


def test_what_exceeds_the_budget_alone_is_not_kept_and_evicts_nothing_but_its_own_entry() -> None:
    sessions = Sessions(4)
    put(sessions, 1, 0)
    put(sessions, 2, 0)
    assert not put(sessions, 2, 0, 0, 0, 0, 0)
    assert (len(sessions), sessions.num_bytes, sessions.num_evicted) == (1, 1, 0)
    assert not Sessions(0).make_room(1, 1)


def test_forgotten_and_cleared_entries_give_their_bytes_back() -> None:
    sessions = Sessions(9)
    put(sessions, 1, 0, 0)
    put(sessions, 2, 0)
    sessions.forget(own(1))
    sessions.forget(own(1))
    assert sessions.num_bytes == 1
    sessions.clear()
    assert (len(sessions), sessions.num_bytes) == (0, 0)


def test_a_conversation_has_one_entry_for_each_adapter_and_all_of_them_end_with_it() -> None:
    sessions = Sessions(9)
    for adapter in (BASE, 0, 1):
        put(sessions, 5, 1, 2, adapter=adapter)
    put(sessions, 6, 1, 2, adapter=0)
    found = sessions.take((5, 1), np.array((1, 2), np.int32))
    assert found is not None
    assert len(sessions) == 3
    sessions.end(5)
    assert (len(sessions), sessions.num_bytes) == (1, 2)
    assert sessions.take((6, 0), np.array((1, 2), np.int32)) is not None
