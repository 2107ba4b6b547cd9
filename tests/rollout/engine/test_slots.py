"""The record of running answers: where each one ends and why, what it holds so far, and where it sits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine.port import GenerationRequest
from rollout.engine.sampler import uniforms
from rollout.engine.slots import Answer, Slots

CONTEXT = 12
STOP = 99


def segment(*tokens: int, version: int = 0) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32))


def answer(
    ticket: int = 1,
    *,
    prompt: tuple[int, ...] = (10, 11, 12),
    prefix: Segment | None = None,
    stop: tuple[int, ...] = (STOP,),
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    segment_tokens: int = 0,
) -> Answer:
    request = GenerationRequest(
        request_id=ticket, prompt_P=np.array(prompt, np.int32), prefix=prefix or Segment.empty(), seed=ticket,
        sampling=Sampling(max_new_tokens=max_new_tokens, temperature=temperature), segment_tokens=segment_tokens,
    )  # fmt: skip
    return Answer(ticket, request, np.array(stop, np.int64), 0.0)


def record(slots: Slots, *tokens: int) -> list[int]:
    """The rows that ended."""
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return slots.record(np.array(tokens, np.int64), logprobs).tolist()


def placed(*answers: Answer, num_slots: int = 4) -> Slots:
    slots = Slots(num_slots, CONTEXT)
    for row, one in enumerate(answers):
        slots.place(one, row, 0)
    return slots


def tokens_until_the_end(one: Answer) -> tuple[int, str]:
    """How many tokens an answer samples that never draws a stop token, and why it ends."""
    slots = placed(one)
    for number in range(1, 2 * CONTEXT):
        if record(slots, 5):
            return number, slots.end_reason(0)
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    ("fields", "ends_after", "reason"),
    [
        ({"max_new_tokens": 1}, 1, "length"),
        ({"max_new_tokens": 4}, 4, "length"),
        ({"max_new_tokens": 4, "prefix": segment(7, 8, 9)}, 1, "length"),
        ({}, CONTEXT - 3, "length"),
        ({"prompt": (1,) * (CONTEXT - 1)}, 1, "length"),
        ({"segment_tokens": 1}, 1, "segment"),
        ({"segment_tokens": 2, "prefix": segment(7, 8, 9)}, 2, "segment"),
        ({"segment_tokens": 4, "max_new_tokens": 4}, 4, "length"),
        ({"segment_tokens": 3, "max_new_tokens": 4}, 3, "segment"),
        ({"segment_tokens": 5, "max_new_tokens": 4}, 4, "length"),
        ({"segment_tokens": CONTEXT - 3}, CONTEXT - 3, "length"),
    ],
)
def test_an_answer_ends_at_the_first_of_its_limits(fields: dict[str, Any], ends_after: int, reason: str) -> None:
    assert tokens_until_the_end(answer(**fields)) == (ends_after, reason)


def test_a_stop_token_ends_the_row_that_samples_it_and_names_the_reason_even_at_the_limit() -> None:
    slots = placed(
        answer(1, stop=(STOP,), max_new_tokens=2), answer(2, stop=(), max_new_tokens=2), answer(3, stop=(4, 5))
    )
    assert record(slots, 7, STOP, 5) == [2]
    assert slots.end_reason(2) == "stop"
    assert record(slots, STOP, STOP, 6) == [0, 1]
    assert [slots.end_reason(row) for row in (0, 1)] == ["stop", "length"]


def test_a_row_forgets_the_stop_tokens_of_the_answer_before() -> None:
    first = answer(1, stop=(4, 5))
    slots = placed(first)
    slots.release(first)
    slots.place(answer(2, stop=(6,)), 0, 0)
    assert record(slots, 5) == []
    assert record(slots, 6) == [0]


def test_a_step_feeds_the_newest_token_at_its_position_and_draws_with_the_number_of_the_next() -> None:
    one, other = answer(1), answer(2, prompt=(20, 21), prefix=segment(30, 31, 32))
    slots = placed(one, other)
    assert slots.tokens_B.tolist() == [12, 32]
    assert slots.positions_B.tolist() == [2, 4]
    assert slots.uniforms_B().tolist() == [uniforms(1, 0, 1)[0], uniforms(2, 3, 1)[0]]
    record(slots, 40, 41)
    assert slots.tokens_B.tolist() == [40, 41]
    assert slots.positions_B.tolist() == [3, 5]
    assert slots.uniforms_B().tolist() == [uniforms(1, 1, 1)[0], uniforms(2, 4, 1)[0]]
    assert [slots.length(each) for each in (one, other)] == [4, 6]
    assert slots.context(one).tolist() == [10, 11, 12], "all but the newest token"
    assert slots.context(other).tolist() == [20, 21, 30, 31, 32]


def test_the_last_token_before_the_context_is_full_has_a_number_too() -> None:
    slots = placed(answer(1, prompt=(1,) * (CONTEXT - 1)), answer(2, prompt=(1,) * (CONTEXT - 1), temperature=0.0))
    assert slots.uniforms_B().tolist() == [uniforms(1, 0, 1)[0], 0.5]


def test_tokens_carry_the_version_and_the_log_prob_they_were_sampled_with() -> None:
    one = answer(1, prefix=segment(7, 8))
    slots = Slots(2, CONTEXT)
    slots.place(one, 0, 3)
    assert len(slots.segment(one)) == 0
    record(slots, 21)
    slots.begin_version(4)
    slots.begin_version(5)
    record(slots, 22)
    record(slots, 23)
    made = slots.segment(one)
    assert made.tokens_R.tolist() == [21, 22, 23], "without prompt and prefix"
    assert made.versions_R.tolist() == [3, 5, 5], "no token was sampled under version 4"
    assert made.logprobs_R.tolist() == [-1.0, -1.0, -1.0]
    record(slots, 24)
    assert made.tokens_R.tolist() == [21, 22, 23], "a segment that was given away does not grow"


def test_each_row_has_its_own_log_probs() -> None:
    answers = [answer(ticket) for ticket in (1, 2, 3)]
    slots = placed(*answers)
    record(slots, 21, 22, 23)
    assert [slots.segment(one).logprobs_R.tolist() for one in answers] == [[-1.0], [-2.0], [-3.0]]
    assert [slots.segment(one).tokens_R.tolist() for one in answers] == [[21], [22], [23]]


def test_rows_of_ended_answers_are_holes_that_the_last_rows_fill_with_all_they_have() -> None:
    answers = [answer(ticket, prompt=(ticket, ticket + 10)) for ticket in range(4)]
    slots = placed(*answers)
    assert (slots.count, slots.num_running, slots.holes()) == (4, 4, [])
    record(slots, 20, 21, 22, 23)
    for one in (answers[0], answers[2]):
        slots.release(one)
    assert (slots.count, slots.num_running, slots.holes()) == (4, 2, [0, 2])
    assert [one.ticket for one in slots.running()] == [1, 3]
    assert slots.compaction() == ([3], [0])
    assert (slots.count, slots.num_running, slots.holes()) == (2, 2, [])
    assert [(one.ticket, one.row) for one in slots.running()] == [(3, 0), (1, 1)]
    assert slots.tokens_B.tolist() == [23, 21]
    record(slots, 33, 31)
    assert slots.segment(answers[3]).tokens_R.tolist() == [23, 33]
    assert slots.segment(answers[1]).tokens_R.tolist() == [21, 31]


def test_holes_at_the_end_are_closed_without_a_move() -> None:
    answers = [answer(ticket) for ticket in range(3)]
    slots = placed(*answers)
    slots.release(answers[2])
    assert slots.compaction() == ([], [])
    assert slots.count == 2
    assert slots.compaction() == ([], [])
    assert slots.count == 2


def test_as_many_answers_as_slots_fit_and_a_freed_slot_is_used_again() -> None:
    answers = [answer(ticket) for ticket in range(2)]
    slots = placed(*answers, num_slots=2)
    assert slots.num_running == 2
    slots.release(answers[1])
    third = answer(7, prompt=(40, 41))
    slots.place(third, 1, 0)
    record(slots, 50, 51)
    assert slots.segment(third).tokens_R.tolist() == [51]
    assert slots.segment(answers[0]).tokens_R.tolist() == [50]


def test_rows_change_places_all_at_once() -> None:
    answers = [answer(ticket, stop=(60 + ticket,)) for ticket in range(3)]
    slots = placed(*answers)
    record(slots, 20, 21, 22)
    slots.move([2, 0, 1], [0, 1, 2])
    assert [one.ticket for one in slots.running()] == [2, 0, 1]
    assert slots.tokens_B.tolist() == [22, 20, 21]
    assert record(slots, 60, 60, 60) == [1], "stop tokens go with their answer"
