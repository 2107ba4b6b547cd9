"""The lease book alone: what is admitted, reported, sent again and forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.trajectory import Segment
from areal_like.wire.messages import SampleProgress
from rollout.leases import LeaseBook


def segment(*tokens: int) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.zeros(count, np.int32))


def running(lease_id: int, new: Segment, *, base: int = 0, reported: int = 0, is_movable: bool = True) -> Any:
    task = SimpleNamespace(lease_id=lease_id)
    return SimpleNamespace(
        task=task, base=base, reported=reported, is_movable=is_movable, all_new=lambda live: new.joined(live[lease_id]),
        turns=SimpleNamespace(checkpoint=f"checkpoint of {lease_id}"),
    )  # fmt: skip


def finished(lease_id: int) -> Any:
    return SimpleNamespace(lease_id=lease_id)


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook(capacity=2)


def test_running_and_unacknowledged_leases_together_are_at_most_twice_the_capacity(book: LeaseBook) -> None:
    for lease_id in (1, 2, 3):
        book.running[lease_id] = running(lease_id, Segment.empty())
    assert book.admission(4) == "new"
    book.running[4] = running(4, Segment.empty())
    book.finish(finished(4))
    assert book.admission(5) == "full"
    assert [book.admission(lease_id) for lease_id in (1, 4)] == ["running", "finished"]


def test_the_lowest_free_lane_is_taken_first(book: LeaseBook) -> None:
    assert [book.take_lane() for _ in range(3)] == [0, 1, 2]
    book.give_lane(2)
    book.give_lane(0)
    assert [book.take_lane() for _ in range(3)] == [0, 2, 3]


def test_a_report_holds_only_the_tokens_after_the_last_one_at_their_position_in_the_answer(book: LeaseBook) -> None:
    book.running[1] = running(1, segment(5, 6), base=10, reported=1)
    book.running[2] = running(2, segment(9), reported=1)
    live = {1: segment(7), 2: Segment.empty()}
    (item,) = book.progress(live)
    assert (item.lease_id, item.start, item.segment.tokens_R.tolist()) == (1, 11, [6, 7])
    assert item.checkpoint == "checkpoint of 1"
    assert book.running[1].reported == 1, "nothing counts as reported before it was sent"


def test_sent_reports_only_move_the_mark_forward(book: LeaseBook) -> None:
    book.running[1] = running(1, segment(5, 6, 7), base=10)
    items = [SampleProgress(lease_id=1, start=11, segment=segment(6, 7))]
    book.mark([*items, SampleProgress(lease_id=9, start=0, segment=segment(1))])
    assert book.running[1].reported == 3
    book.mark([SampleProgress(lease_id=1, start=10, segment=segment(5))])
    assert book.running[1].reported == 3


def test_a_returned_lease_carries_exactly_what_was_not_reported(book: LeaseBook) -> None:
    run = running(1, segment(5, 6), base=10, reported=1)
    message = book.returned(run, {1: segment(7)}, "drain")
    assert (message.lease_id, message.start, message.reason) == (1, 11, "drain")
    assert message.segment.tokens_R.tolist() == [6, 7]
    assert message.checkpoint == "checkpoint of 1"
    nothing_new = running(1, segment(5, 6), reported=2)
    assert book.returned(nothing_new, {1: Segment.empty()}, "drain").checkpoint is None


def test_only_held_leases_that_can_be_moved_are_movable(book: LeaseBook) -> None:
    book.running[1] = running(1, Segment.empty())
    book.running[2] = running(2, Segment.empty(), is_movable=False)
    assert [run.task.lease_id for run in book.movable([1, 2, 3])] == [1]


def test_a_finished_sample_leaves_the_running_ones_and_is_counted_once_when_acknowledged(book: LeaseBook) -> None:
    book.running[1] = running(1, Segment.empty())
    book.finish(finished(1))
    book.finish(finished(2))
    assert not book.running
    assert book.ack([1, 1, 7]) == 1
    assert list(book.unacked) == [2]


def test_a_finished_sample_is_due_when_never_sent_and_again_after_the_full_interval(book: LeaseBook) -> None:
    book.finish(finished(1))
    assert [message.lease_id for message in book.due(0.0, 5.0)] == [1]
    assert not book.was_sent(1)
    book.sent(1, 10.0)
    assert book.was_sent(1)
    assert book.due(14.0, 5.0) == []
    assert [message.lease_id for message in book.due(15.0, 5.0)] == [1]
    book.sent(1, 15.0)
    book.send_again()
    assert [message.lease_id for message in book.due(15.0, 5.0)] == [1]


def test_the_time_of_sending_is_kept_only_while_the_sample_is_unacknowledged(book: LeaseBook) -> None:
    book.finish(finished(1))
    book.sent(1, 1.0)
    book.ack([1])
    assert not book.was_sent(1)
    book.sent(1, 2.0)
    assert not book.was_sent(1)
