"""Handles what rollout workers report about samples: partial tokens, finished samples, returned leases.

Implements exactly-once acceptance and the checks of `stamped-versions`. The fate of groups is decided in
group_outcome.py.

A finished sample is accepted from any lease of it, and only the first is kept, as long as its group is live and its
first token is not older than the group's floor (a late answer from a lost worker must not make a deadline earlier,
which would violate invariant I of areal_like/staleness.py). All reports are acknowledged.
"""

from __future__ import annotations

from areal_like.trajectory import NO_VERSION
from controller.coordinator import evaluation
from controller.coordinator.effects import SendAck, StoreFinished, StorePartial
from controller.coordinator.events import LeaseReturned, PartialReport, ProgressReported, SampleReported
from controller.coordinator.group_outcome import drop_group, effective_value, finalize_group
from controller.coordinator.groups import Group, Sample
from controller.coordinator.run_state import RunState
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.worker import Lease


def take_finished(state: RunState, event: SampleReported) -> None:
    """Handle a finished and scored sample."""
    outcome = event.outcome
    lease = state.leases.get(outcome.lease_id)
    if lease is None or (lease.group_id, lease.sample_index) != (outcome.group_id, outcome.sample_index):
        state.note("duplicate", f"{event.worker} reported lease {outcome.lease_id} twice, or after the lease had ended")
    elif lease.purpose == "eval":
        evaluation.take_result(state, lease, event)
    else:
        _take_training_sample(state, lease, event)
    # Always acknowledged, even if refused: otherwise the worker sends it again.
    state.emit(SendAck(worker=event.worker, lease_ids=(outcome.lease_id,)))


def _take_training_sample(state: RunState, lease: Lease, event: SampleReported) -> None:
    groups = state.groups
    outcome = event.outcome
    group = groups.table.live[lease.group_id]
    sample = group.samples[lease.sample_index]
    is_current = sample.lease_id == lease.lease_id  # otherwise the sample was leased again since then
    if refusal := _refusal(state, group, lease, outcome):
        state.note("refused", f"{event.worker}: group {group.group_id} sample {sample.index}: {refusal}")
        state.release(lease)
        if is_current:
            requeue(state, group, sample, is_loss=True, cause=refusal)
        return
    if outcome.verdict_kind != "scored" and not groups.first_failure:
        groups.first_failure = f"{outcome.verdict_kind}, {outcome.reason}" if outcome.reason else outcome.verdict_kind
    value, policy = effective_value(state.settings, outcome)
    sample.finish(outcome, value)
    state.release(lease)
    # Only the first result is kept: any other worker stops working on this sample.
    rivals = [state.leases[lease_id] for lease_id in sorted(group.lease_ids)]
    state.cancel([rival for rival in rivals if rival.sample_index == sample.index])
    groups.table.refresh(group)
    state.progress += 1
    groups.num_samples_finished += 1
    state.routing.lengths.add(outcome.num_tokens)
    state.emit(StoreFinished(purpose="train", outcome=outcome, value=value, is_kept=sample.is_kept, policy=policy))
    if policy == "drop_group":
        drop_group(state, group, f"verdict_{outcome.verdict_kind}", f"sample {sample.index}")
    elif group.is_complete:
        finalize_group(state, group)


def _refusal(state: RunState, group: Group, lease: Lease, outcome: SampleOutcome) -> str:
    """Why this finished sample cannot be used; empty if it can."""
    if outcome.num_tokens < 1 or outcome.last_version < outcome.first_version:
        return "no tokens, or versions that decrease"
    if outcome.first_version < group.version or outcome.last_version < lease.min_version:
        return f"sampled by a version older than its lease's minimum version {lease.min_version}"
    if state.settings.is_strict and outcome.first_version < group.floor:
        return f"its first version {outcome.first_version} is older than the group's floor {group.floor}"
    return ""


def take_progress(state: RunState, event: ProgressReported) -> None:
    """Handle partial tokens of running leases."""
    for part in event.items:
        lease = state.leases.get(part.lease_id)
        if lease is not None and not lease.is_void and lease.worker == event.worker:
            if lease.purpose == "train":
                _store_part(state, lease, part)
            elif part.num_tokens:
                state.weigh(lease, part.start + part.num_tokens)
                state.progress += 1


def take_returned(state: RunState, event: LeaseReturned) -> None:
    """Handle a lease returned unfinished."""
    lease = state.leases.get(event.part.lease_id)
    if lease is None or lease.is_void:
        return
    if lease.purpose == "eval":
        evaluation.take_back(state, lease, event)
        return
    group = state.groups.table.live[lease.group_id]
    sample = group.samples[lease.sample_index]
    _store_part(state, lease, event.part)
    state.release(lease)
    if event.reason == "rejected":
        state.groups.last_rejection = event.detail
        drop_group(state, group, "rejected", event.detail)
        return
    if event.reason == "refused":
        state.groups.last_refusal = event.detail
        drop_group(state, group, "refused", event.detail)
        return
    is_moved = event.reason in ("drain", "migrated")
    sample.moved_from = event.worker if is_moved else ""
    # Its last tokens may have been reported as progress already: all new tokens of the lease count.
    is_orderly = is_moved or (event.reason == "segment" and sample.num_tokens > lease.num_prefix)
    if not is_orderly:
        what = f"{event.reason}, {event.detail}" if event.detail else event.reason
        state.note("returned", f"{event.worker} returned group {group.group_id} sample {sample.index}: {what}")
    requeue(state, group, sample, is_loss=not is_orderly, cause=event.detail)


def requeue(state: RunState, group: Group, sample: Sample, *, is_loss: bool, cause: str = "") -> None:
    """Queue the sample for another lease, unless it was lost too often (bounded retries, `bounded-resources`).
    cause: why it was lost; empty if its worker was."""
    sample.num_losses += is_loss
    if sample.num_losses > state.settings.max_sample_losses:
        state.groups.last_loss = cause
        times = f"sample {sample.index} was lost {sample.num_losses} times"
        drop_group(state, group, "lost_too_often", f"{times}, at last because {cause}" if cause else times)
    else:
        state.groups.table.push_pending(group, sample)


def _store_part(state: RunState, lease: Lease, part: PartialReport) -> None:
    """Store the tokens that are new and continue the known ones."""
    group = state.groups.table.live[lease.group_id]
    sample = group.samples[lease.sample_index]
    skip = sample.num_tokens - part.start
    num_fresh = part.num_tokens - skip
    if part.num_tokens == 0 or num_fresh <= 0:
        return
    if skip < 0 or part.start < 0:
        state.note(
            "gap",
            f"lease {part.lease_id} reports from token {part.start}, but only {sample.num_tokens} tokens are known",
        )
        return
    # If known tokens are skipped, the version of the first new token is not reported; it is at most that of the last
    # token.
    oldest = part.first_version if skip == 0 else part.last_version
    if oldest < group.min_version(sample) or part.last_version < part.first_version:
        state.note(
            "refused", f"lease {part.lease_id}: tokens were sampled by a version older than {group.min_version(sample)}"
        )
        return
    state.emit(
        StorePartial(
            lease_id=part.lease_id,
            group_id=group.group_id,
            sample_index=sample.index,
            start=sample.num_tokens,
            skip=skip,
            num_tokens=num_fresh,
        )
    )
    if sample.first_version == NO_VERSION:
        sample.first_version = part.first_version
        state.groups.table.refresh(group)
    sample.num_tokens += num_fresh
    sample.last_version = part.last_version
    state.weigh(lease, sample.num_tokens)
    state.progress += 1
