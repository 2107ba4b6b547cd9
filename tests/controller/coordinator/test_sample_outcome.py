"""The facts of a finished sample: taken from the message once, and carried unchanged into the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, leased, only
from real_ledger import trajectory_of

from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleFinished
from controller.coordinator.effects import StoreFinished
from controller.coordinator.events import SampleReported
from controller.coordinator.sample_outcome import MAX_REASON_CHARS, SampleOutcome


def outcome_of(verdict: Verdict, *, is_eval: bool = False) -> SampleOutcome:
    message = SampleFinished(
        lease_id=7, group_id=2, sample_index=1, trajectory=trajectory_of([3, 3, 4]), verdict=verdict
    )
    return SampleOutcome.from_message(message, is_eval=is_eval)


def test_the_facts_are_those_of_the_message() -> None:
    assert outcome_of(Verdict(kind="scored", value=0.5)) == SampleOutcome(
        lease_id=7, group_id=2, sample_index=1, num_tokens=3, first_version=3, last_version=4, verdict_kind="scored",
        value=0.5,
    )  # fmt: skip


def test_an_evaluation_counts_whether_the_answer_is_correct_where_the_scorer_says_so() -> None:
    verdict = Verdict(kind="scored", value=0.5, components={"correct": 1.0})
    assert (outcome_of(verdict).value, outcome_of(verdict, is_eval=True).value) == (0.5, 1.0)
    assert outcome_of(Verdict(kind="scored", value=0.5), is_eval=True).value == 0.5


def test_the_reason_of_a_non_score_is_kept_in_part_and_that_of_a_score_is_not() -> None:
    failed = outcome_of(Verdict(kind="crashed", reason="x" * 1000, failed_in="judge"))
    assert (len(failed.reason), failed.failed_in, failed.value) == (MAX_REASON_CHARS, "judge", None)
    assert outcome_of(Verdict(kind="scored", value=1.0, reason="because")).reason == ""


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_the_ledger_gets_the_outcome_as_it_was_reported(purpose: Any) -> None:
    desk = Desk(groups_per_step=1, num_eval_rows=1, on_failure=0.25)
    desk.start()
    (order, *_) = [order for order in leased(desk.effects) if order.purpose == purpose]
    outcome = SampleOutcome(
        lease_id=order.lease_id, group_id=order.group_id, sample_index=0, num_tokens=5, first_version=0, last_version=0,
        verdict_kind="crashed", failed_in="judge", reason="no answer",
    )  # fmt: skip
    stored = only(desk.do(SampleReported(worker="w0", outcome=outcome)), StoreFinished)
    assert stored.outcome is outcome
    assert stored.value == (0.25 if purpose == "train" else None), "the policy's number counts, the reported one stays"
