"""How a live group ends: ready, filtered or dropped (shipping is the coordinator's).

Owns: the verdict policy (`verdicts-not-zeros`), the filter of groups without signal, the counts of endings. Refuses:
touching leases other than through `RunState.forget_group`.
"""

from __future__ import annotations

from controller.coordinator.effects import DropGroup, FilterGroup
from controller.coordinator.events import Policy
from controller.coordinator.groups import Group
from controller.coordinator.run_state import RunState
from controller.coordinator.sample_outcome import SampleOutcome


def effective_value(state: RunState, outcome: SampleOutcome) -> tuple[float | None, Policy]:
    """The reward that counts: the scored value, or the policy's number for a non-score, or None (not kept); and what
    the policy of the scorer that failed did."""
    if outcome.verdict_kind == "scored":
        return outcome.value, ""
    policy = state.settings.on_failure_of.get(outcome.failed_in, state.settings.on_failure)
    return (None, policy) if isinstance(policy, str) else (float(policy), "value")


def drop_group(state: RunState, group: Group, reason: str, detail: str = "") -> None:
    """Give the group up; its running leases are cancelled and its place is free again."""
    state.forget_group(group)
    state.dropped[reason] += 1
    if reason not in ("stale", "surplus"):
        state.consecutive_failures[reason] += 1
    state.emit(DropGroup(group_id=group.group_id, reason=reason, detail=detail))


def finalize_group(state: RunState, group: Group) -> None:
    """Every sample is in: keep the group for a batch, filter it, or drop it for want of scores."""
    values = [sample.value for sample in group.samples if sample.is_kept and sample.value is not None]
    if len(values) < state.settings.min_scored:
        drop_group(state, group, "too_few_scores", f"{len(values)} of {len(group.samples)} samples have a score")
    elif state.settings.filter_zero_signal and len(group.samples) > 1 and min(values) == max(values):
        state.forget_group(group)
        state.num_filtered += 1
        state.consecutive_failures["filtered"] += 1
        state.emit(FilterGroup(group_id=group.group_id, value=values[0]))
    else:
        state.table.mark_ready(group)
        state.consecutive_failures.clear()
        state.first_failure = ""
        state.has_kept = True
