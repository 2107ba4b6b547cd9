"""How a live group ends: ready, filtered or dropped.

Applies the verdict policy (`verdicts-not-zeros`) and the filter of groups without signal, and counts the outcomes.
Leases are ended through `RunState.forget_group`.
"""

from __future__ import annotations

from areal_like.verdict import REFUSED
from controller.coordinator.effects import DropGroup, FilterGroup
from controller.coordinator.events import Policy
from controller.coordinator.groups import Group
from controller.coordinator.run_state import RunState
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.settings import CoordinatorSettings


def effective_value(settings: CoordinatorSettings, outcome: SampleOutcome) -> tuple[float | None, Policy]:
    """The effective reward: the scored value, or the configured number for a missing score, or None (not kept); and the
    handling of the missing score.
    """
    if outcome.verdict_kind == "scored":
        return outcome.value, ""
    if outcome.verdict_kind == REFUSED:  # no failure of a scorer: no configured reward stands for it
        return None, "drop_sample"
    policy = settings.on_failure_of.get(outcome.failed_in, settings.on_failure)
    return (None, policy) if isinstance(policy, str) else (float(policy), "value")


def drop_group(state: RunState, group: Group, reason: str, detail: str = "") -> None:
    """Drop the group; its running leases are cancelled and its place is free."""
    state.forget_group(group)
    state.groups.dropped[reason] += 1
    # These two are not failures: the group was fit for training, but its step has passed.
    if reason not in ("stale", "surplus"):
        state.groups.consecutive_failures[reason] += 1
        state.groups.num_failed += 1
    state.emit(DropGroup(group_id=group.group_id, reason=reason, detail=detail))


def finalize_group(state: RunState, group: Group) -> None:
    """Finish a complete group: keep it for a batch, filter it, or drop it because too few samples have a score."""
    groups = state.groups
    kept = [sample for sample in group.samples if sample.is_kept and sample.value is not None]
    values = [sample.value for sample in kept if sample.value is not None]
    if len(values) >= state.settings.min_scored:
        groups.draws.ended(group.draw, values, sum(sample.num_tokens for sample in kept) / len(kept))
    if len(values) < state.settings.min_scored:
        drop_group(state, group, "too_few_scores", f"{len(values)} of {len(group.samples)} samples have a score")
    elif state.settings.filter_zero_signal and len(group.samples) > 1 and min(values) == max(values):
        state.forget_group(group)
        groups.num_filtered += 1
        groups.num_failed += 1
        groups.consecutive_failures["filtered"] += 1
        state.emit(FilterGroup(group_id=group.group_id, value=values[0]))
    else:
        groups.table.mark_ready(group)
        groups.consecutive_failures.clear()
        groups.first_failure = ""
        groups.has_kept = True
