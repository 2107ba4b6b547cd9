"""Claims about partial and finished samples: which tokens are stored, and what becomes of the sample."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from desk import Desk, has, leased, only

from controller.coordinator.effects import DropGroup, Effect, Note, SendAck, SendCancel, StoreFinished, StorePartial
from controller.coordinator.events import SampleReported
from controller.coordinator.sample_outcome import SampleOutcome


def running(**changes: int) -> Desk:
    """One group of one sample, leased to w0; w1 is there too."""
    desk = Desk(**{"groups_per_step": 1, "max_staleness": 0, "num_workers": 2, **changes})
    desk.start(workers=("w0", "w1"))
    return desk


def holder(desk: Desk) -> str:
    return desk.held[desk.lease_of(0)][0]


def report(desk: Desk, start: int, versions: list[int]) -> list[Effect]:
    return desk.progress(desk.lease_of(0), start, versions, worker=holder(desk))


def stored(effects: list[Effect]) -> list[tuple[int, int, int]]:
    """Start, tokens skipped and tokens kept of each part that was stored."""
    return [(one.start, one.skip, one.num_tokens) for one in effects if isinstance(one, StorePartial)]


# ---------------------------------------------------------------- tokens


def test_only_tokens_that_are_new_are_stored() -> None:
    desk = running()
    before = desk.coordinator.progress
    assert stored(report(desk, 0, [0, 0])) == [(0, 0, 2)]
    assert desk.coordinator.progress > before
    assert stored(report(desk, 0, [0, 0])) == [], "known already"
    assert stored(report(desk, 1, [0])) == [], "known already"
    assert stored(report(desk, 1, [0, 0, 0])) == [(2, 1, 2)]
    assert stored(report(desk, 4, [0])) == [(4, 0, 1)]
    assert stored(report(desk, 5, [])) == []
    (order,) = leased(desk.give_back(desk.lease_of(0), 5, [], "drain"))
    assert (order.prefix_tokens, order.min_version) == (5, 0)


@pytest.mark.parametrize("start", [3, -1])
def test_tokens_that_do_not_follow_what_is_known_are_not_stored(start: int) -> None:
    desk = running()
    report(desk, 0, [0, 0])
    effects = report(desk, start, [0, 0, 0, 0])
    assert stored(effects) == []
    if start > 0:
        note = only(effects, Note)
        assert (note.kind, note.text) == (
            "gap",
            f"lease {desk.lease_of(0)} reports from token 3, but only 2 tokens are known",
        )


def test_tokens_of_versions_that_decrease_are_not_stored() -> None:
    desk = running()
    assert only(report(desk, 0, [-1]), Note).kind == "refused"
    assert stored(report(desk, 0, [0, 2])) == [(0, 0, 2)]
    assert only(report(desk, 2, [1, 2]), Note).text.endswith("tokens were sampled by a version older than 2")
    assert only(report(desk, 2, [3, 2]), Note).kind == "refused"
    assert stored(report(desk, 0, [0, 2, 2])) == [(2, 2, 1)], "the first of the part may be old where it is known"
    assert only(report(desk, 1, [2, 2, 1]), Note).kind == "refused"


def test_a_report_of_another_worker_or_of_a_lost_lease_stores_nothing() -> None:
    desk = running()
    lease_id, first = desk.lease_of(0), holder(desk)
    other = "w1" if first == "w0" else "w0"
    assert stored(desk.progress(lease_id, 0, [0, 0], worker=other)) == []
    desk.lose(first)
    assert stored(desk.progress(lease_id, 0, [0, 0], worker=first)) == []
    assert stored(desk.progress(999, 0, [0, 0], worker=first)) == []
    assert desk.held[desk.lease_of(0)][1].prefix_tokens == 0


# ---------------------------------------------------------------- finished and returned


def test_a_finished_sample_is_stored_as_reported_and_used_once() -> None:
    desk = running()
    lease_id, worker = desk.lease_of(0), holder(desk)
    effects = desk.finish(0, value=0.5)
    kept = only(effects, StoreFinished)
    done = kept.outcome
    assert (kept.purpose, done.lease_id, done.group_id, done.sample_index, done.num_tokens) == (
        "train", lease_id, 0, 0, 5,
    )  # fmt: skip
    assert (done.first_version, done.last_version, done.verdict_kind) == (0, 0, "scored")
    assert (kept.value, kept.is_kept, kept.policy) == (0.5, True, "")
    assert desk.coordinator.counts().samples_finished == 1
    assert not has(effects, SendCancel), "its worker has nothing left to cancel"
    again = desk.report(lease_id, group_id=0, worker=worker)
    assert only(again, Note).text == f"{worker} reported lease {lease_id} twice, or after the lease had ended"
    assert only(again, SendAck).lease_ids == (lease_id,)
    assert not has(again, StoreFinished)
    assert desk.coordinator.counts().samples_finished == 1


@pytest.mark.parametrize(("group_id", "sample_index"), [(1, 0), (0, 1)])
def test_an_answer_that_names_another_sample_than_its_lease_is_not_used(group_id: int, sample_index: int) -> None:
    desk = running(groups_per_step=2, group_size=2)
    lease_id = desk.lease_of(0)
    effects = desk.report(lease_id, group_id=group_id, sample_index=sample_index, worker=holder(desk))
    assert not has(effects, StoreFinished)
    assert only(effects, SendAck).lease_ids == (lease_id,)


def test_a_sample_may_be_lost_as_often_as_the_limit_says() -> None:
    desk = running(max_sample_losses=1)
    effects = desk.give_back(desk.lease_of(0), 0, [], "cancelled")
    note = only(effects, Note)
    assert note.kind == "returned"
    assert note.text.endswith("returned group 0 sample 0: cancelled")
    assert desk.coordinator.counts().dropped == {}
    desk.give_back(desk.lease_of(0), 0, [], "cancelled")
    assert desk.coordinator.counts().dropped == {"lost_too_often": 1}


def test_a_sample_whose_teacher_is_away_is_tried_again_as_often_and_then_named_as_the_cause() -> None:
    desk = running(max_sample_losses=1)
    why = "the teacher did not answer: http://h failed 4 times"
    effects = desk.give_back(desk.lease_of(0), 0, [], "cancelled", why)
    assert only(effects, Note).text.endswith(f"returned group 0 sample 0: cancelled, {why}")
    assert desk.coordinator.counts().dropped == {}
    effects = desk.give_back(desk.lease_of(0), 0, [], "cancelled", why)
    dropped = only(effects, DropGroup)
    assert dropped.reason == "lost_too_often"
    assert dropped.detail == f"sample 0 was lost 2 times, at last because {why}"


@pytest.mark.parametrize("reason", ["drain", "migrated"])
def test_a_sample_handed_back_normally_is_never_a_loss(reason: str) -> None:
    desk = running(max_sample_losses=0)
    for _ in range(3):
        effects = desk.give_back(desk.lease_of(0), 0, [], reason)
        assert not [one for one in effects if isinstance(one, Note) and one.kind == "returned"]
    assert desk.coordinator.counts().dropped == {}


def test_a_sample_whose_answer_is_refused_was_lost_and_is_given_out_again() -> None:
    desk = running(max_sample_losses=1)
    first = desk.finish(0, first=-1, last=0)
    assert only(first, Note).text.endswith(
        "group 0 sample 0: sampled by a version older than its lease's minimum version 0"
    )
    assert [(order.group_id, order.prefix_tokens) for order in leased(first)] == [(0, 0)]
    assert not has(first, StoreFinished)
    desk.finish(0, first=-1, last=0)
    assert desk.coordinator.counts().dropped == {"lost_too_often": 1}


def test_work_is_estimated_by_the_answers_that_have_finished() -> None:
    desk = running(max_new_tokens=1000, groups_per_step=8)
    for group_id in range(8):
        desk.finish(group_id)
    assert desk.coordinator._state.routing.lengths.mean == 5.0, "each of them had five tokens"


@pytest.mark.parametrize(
    ("facts", "is_used"),
    [
        ({"num_tokens": 1}, True), ({"num_tokens": 0}, False),
        ({"last_version": 2}, True), ({"last_version": -1}, False),
        ({"first_version": 2, "last_version": 1}, False), ({"first_version": -1}, False),
    ],
)  # fmt: skip
def test_an_answer_is_used_if_it_has_tokens_and_its_versions_do_not_decrease(
    facts: dict[str, Any], is_used: bool
) -> None:
    desk = running()
    whole = SampleOutcome(
        lease_id=desk.lease_of(0), group_id=0, sample_index=0, num_tokens=5, first_version=0, last_version=0,
        verdict_kind="scored", value=1.0, failed_in="", reason="",
    )  # fmt: skip
    outcome = msgspec.structs.replace(whole, **facts)
    assert has(desk.do(SampleReported(worker=holder(desk), outcome=outcome)), StoreFinished) == is_used


@pytest.mark.parametrize(("last", "is_used"), [(0, False), (1, True)])
def test_an_answer_that_goes_on_ends_with_no_older_version_than_its_prefix(last: int, is_used: bool) -> None:
    desk = running(max_staleness=4)
    desk.finish(1)
    desk.ask(1)
    desk.publish(1)
    for worker in ("w0", "w1"):
        desk.load(worker, 1)
    desk.give_back(desk.lease_of(0), 0, [0, 1], "drain")
    assert has(desk.finish(0, first=0, last=last), StoreFinished) == is_used
