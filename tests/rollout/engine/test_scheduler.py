"""The queue of an engine: when answers are admitted, which are taken out, and whose row lends a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engine.scheduler import Scheduler


def answer(ticket: int, share_key: int = 7, prompt: tuple[int, ...] = (1, 2), adapter: int = -1) -> Any:
    return SimpleNamespace(
        ticket=ticket,
        request=SimpleNamespace(share_key=share_key, prompt_P=np.array(prompt, np.int32)),
        adapter=adapter,
    )


def tickets(answers: list[Any]) -> list[int]:
    return [one.ticket for one in answers]


@pytest.mark.parametrize(
    ("num_slots", "num_waiting", "num_free", "admitted"),
    [
        (64, 5, 3, 0),
        (64, 5, 4, 4),
        (64, 5, 9, 5),
        (64, 2, 2, 2),
        (64, 2, 1, 0),
        (8, 5, 1, 1),
        (8, 5, 0, 0),
        (31, 5, 1, 1),
    ],
)
def test_answers_are_admitted_once_a_sixteenth_of_the_rows_is_free_or_all_that_wait_fit(
    num_slots: int, num_waiting: int, num_free: int, admitted: int
) -> None:
    scheduler = Scheduler(num_slots)
    for ticket in range(num_waiting):
        scheduler.push(answer(ticket))
    assert tickets(scheduler.take(num_free)) == list(range(admitted))
    assert len(scheduler) == num_waiting - admitted


def test_an_answer_is_removed_by_its_ticket_and_the_order_of_the_others_stays() -> None:
    scheduler = Scheduler(4)
    for ticket in (1, 2, 3):
        scheduler.push(answer(ticket))
    removed = scheduler.remove(2)
    assert removed is not None
    assert removed.ticket == 2
    assert scheduler.remove(2) is None
    assert tickets(scheduler.drain()) == [1, 3]
    assert len(scheduler) == 0


def test_a_row_lends_its_prompt_only_to_answers_of_its_group_with_the_same_prompt() -> None:
    scheduler = Scheduler(4)
    owner, private = answer(1), answer(2, share_key=-1)
    scheduler.share_prompt(owner)
    scheduler.share_prompt(private)
    assert scheduler.prompt_owner(answer(3)) is owner
    assert scheduler.prompt_owner(answer(3, share_key=8)) is None
    assert scheduler.prompt_owner(answer(3, prompt=(1, 3))) is None
    assert scheduler.prompt_owner(answer(3, share_key=-1)) is None
    assert scheduler.prompt_owner(answer(3, adapter=0)) is None, "other keys and values"
    scheduler.share_prompt(answer(4, share_key=0))
    assert scheduler.prompt_owner(answer(5, share_key=0)) is not None


def test_a_row_that_is_free_or_has_old_weights_lends_nothing() -> None:
    scheduler = Scheduler(4)
    first, second = answer(1), answer(2)
    scheduler.share_prompt(first)
    scheduler.share_prompt(second)
    scheduler.unshare_prompt(answer(9))
    scheduler.unshare_prompt(first)
    assert scheduler.prompt_owner(answer(3)) is second
    scheduler.unshare_prompt(second)
    scheduler.unshare_prompt(second)
    assert scheduler.prompt_owner(answer(3)) is None
    scheduler.share_prompt(first)
    scheduler.unshare_all()
    assert scheduler.prompt_owner(answer(3)) is None
