"""What each message of a process means to the coordinator, and what of it goes to the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from real_ledger import segment_of, trajectory_of

from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from controller.coordinator.effects import RecordGroup, StoreFinished, StorePartial
from controller.coordinator.events import (
    BatchRequested,
    CheckpointTaken,
    LeaseReturned,
    PartialReport,
    ProgressReported,
    Published,
    SampleReported,
    VersionRewritten,
    WorkerIncident,
    WorkerReleased,
    WorkerVersionFailed,
    WorkerVersionLoaded,
    WorkerVersionStaged,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.ledger.transaction import LedgerEntry
from controller.runtime.inbound import MAX_REASON_CHARS, InboundEvent, entry_of, translate

LONG = "x" * (MAX_REASON_CHARS + 1)
CUT = "x" * MAX_REASON_CHARS


def received(message: m.Message, *, evals: tuple[int, ...] = ()) -> InboundEvent:
    found = translate("rollout-3", message, is_eval=lambda lease_id: lease_id in evals)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (m.VersionStaged(version=2, lineage="l1"), WorkerVersionStaged(worker="rollout-3", version=2, lineage="l1")),
        (m.VersionLoaded(version=2, lineage="l1", stage_s=1.0, pause_s=0.5),
         WorkerVersionLoaded(worker="rollout-3", version=2, lineage="l1")),
        (m.VersionFailed(version=2, lineage="l1", reason=LONG, is_damaged=True),
         WorkerVersionFailed(worker="rollout-3", version=2, lineage="l1", reason=CUT, is_damaged=True)),
        (m.MemoryReleased(number=4, num_bytes=9, seconds=0.5),
         WorkerReleased(worker="rollout-3", number=4, num_bytes=9)),
        (m.Incident(text=LONG), WorkerIncident(worker="rollout-3", text=CUT)),
        (m.BatchRequest(step=5), BatchRequested(step=5)),
        (m.VersionRewritten(version=2, lineage="l1", manifest_path="/m", reason=LONG),
         VersionRewritten(version=2, lineage="l1", manifest_path="/m", reason=CUT)),
        (
            m.CheckpointSaved(version=2, path="/c", digest="0f" * 32),
            CheckpointTaken(version=2, path="/c", digest="0f" * 32),
        ),
    ],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
def test_a_short_message_is_the_event_of_its_sender(message: m.Message, event: Any) -> None:
    assert received(message) == InboundEvent(event)


def test_what_nobody_awaits_is_no_event() -> None:
    assert translate("rollout-3", m.Goodbye(reason="done"), is_eval=lambda _: False) is None


def test_a_published_version_brings_what_the_trainer_measured() -> None:
    found = received(m.VersionPublished(version=3, lineage="l0", manifest_path="/m", metrics={"loss": 0.5}))
    assert found.event == Published(version=3, lineage="l0", manifest_path="/m")
    assert found.metrics == {"loss": 0.5}


def test_progress_reports_each_lease_with_its_tokens_and_their_versions() -> None:
    first, second = segment_of([1, 1, 2]), segment_of([4], start=7)
    items = (
        m.SampleProgress(lease_id=10, start=0, segment=first), m.SampleProgress(lease_id=11, start=7, segment=second),
    )  # fmt: skip
    found = received(m.Progress(items=items))
    assert found.event == ProgressReported(worker="rollout-3", items=(
        PartialReport(lease_id=10, start=0, num_tokens=3, first_version=1, last_version=2),
        PartialReport(lease_id=11, start=7, num_tokens=1, first_version=4, last_version=4),
    ))  # fmt: skip
    assert found.segments == {10: first, 11: second}
    assert found.worker == "rollout-3"
    stored = StorePartial(lease_id=11, group_id=1, sample_index=0, start=7, skip=0, num_tokens=1)
    assert entry_of(stored, found) == LedgerEntry(effect=stored, segment=second)


def test_a_lease_that_is_handed_back_brings_its_last_tokens() -> None:
    segment = segment_of([2, 3], start=5)
    found = received(m.SampleReturned(lease_id=10, start=5, segment=segment, reason="rejected", detail="too long"))
    part = PartialReport(lease_id=10, start=5, num_tokens=2, first_version=2, last_version=3)
    assert found.event == LeaseReturned(worker="rollout-3", part=part, reason="rejected", detail="too long")
    assert found.segments == {10: segment}
    assert found.worker == "rollout-3"


def finished(verdict: Verdict) -> m.SampleFinished:
    return m.SampleFinished(
        lease_id=10, group_id=4, sample_index=1, trajectory=trajectory_of([1, 1, 2]), verdict=verdict,
        response_text="42", timings={"score_s": 1.0},
    )  # fmt: skip


def test_a_finished_sample_is_reported_with_its_reward_and_stored_with_all_of_it() -> None:
    verdict = Verdict(kind="scored", value=0.5, components={"correct": 1.0}, reason="a remark")
    message = finished(verdict)
    found = received(message)
    outcome = SampleOutcome(
        lease_id=10, group_id=4, sample_index=1, num_tokens=3, first_version=1, last_version=2, verdict_kind="scored",
        value=0.5, failed_in="", reason="",
    )  # fmt: skip
    assert found.event == SampleReported(worker="rollout-3", outcome=outcome)
    stored = StoreFinished(purpose="train", outcome=outcome, value=0.5, is_kept=True)
    assert entry_of(stored, found) == LedgerEntry(
        effect=stored, trajectories=message.trajectories, verdict=verdict, response_text="42", timings={"score_s": 1.0},
        worker="rollout-3",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "value"),
    [
        (Verdict(kind="scored", value=0.5, components={"correct": 1.0}), 1.0),
        (Verdict(kind="scored", value=0.5, components={"style": 1.0}), 0.5),
        (Verdict(kind="crashed", components={"correct": 1.0}, reason=LONG, failed_in="math"), None),
    ],
)
def test_an_evaluation_counts_correctness_where_the_scorer_names_it(verdict: Verdict, value: float | None) -> None:
    event = received(finished(verdict), evals=(10,)).event
    assert isinstance(event, SampleReported)
    assert event.outcome.value == value
    assert (event.outcome.reason, event.outcome.failed_in) == (("", "") if verdict.is_scored else (CUT, "math"))


def test_an_entry_of_another_effect_is_the_effect_alone() -> None:
    effect = RecordGroup(group_id=1, version=0, started=1)
    assert entry_of(effect, received(m.BatchRequest(step=5))) == LedgerEntry(effect=effect)
