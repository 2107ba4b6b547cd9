"""Decides how many rollout workers the run has, within limits (`rollout.autoscale`).

The rule has no clock: each call adds the time since the last one to the condition that held since then. At the end of a
window it compares shares of the window with two thresholds, and it acts after several windows in a row with the same
result. After a change it waits until the change has taken effect. Workers are started and drained by the shell.

  starved   the trainer waits for a batch, and every slot of the usable workers is taken: another worker would help
  blocked   the staleness bound allows no further group, and the other workers have slots for all running samples: one
            worker is not needed. With a bound of 0 this holds whenever the trainer works, and means nothing
  paused    none of this means anything: evaluations, replay, the start and the end of a run
"""

from __future__ import annotations

import math
from typing import NamedTuple

from controller.coordinator import admission
from controller.coordinator.effects import AddWorker, RetireWorker
from controller.coordinator.run_parts import Condition, ScalingState
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.settings import ScalingRule
from controller.coordinator.worker import Worker


class Verdict(NamedTuple):
    """Result of one window: 1 another worker would help, -1 one is not needed, 0 neither; and the sentence."""

    direction: int
    text: str = ""


def advance(state: RunState) -> None:
    """Account for the time since the last call, and decide at the end of a window."""
    rule, scaling = state.settings.autoscale, state.scaling
    if rule is None:
        return
    _account(scaling, rule, state.now_s)
    if not _has_taken_effect(state, scaling):
        scaling.condition = "paused"
        return
    scaling.condition = condition_of(state)
    if scaling.starved_s + scaling.blocked_s + scaling.balanced_s >= rule.window_s:
        _decide(state, rule, scaling)


def condition_of(state: RunState) -> Condition:
    """The condition that holds now."""
    if state.phase is not Phase.RUNNING or state.evaluations.jobs or not state.workers.usable or _is_replaying(state):
        return "paused"
    usable, groups = state.workers.usable, state.groups
    is_at_end = groups.num_started >= state.settings.num_steps * state.settings.groups_per_step
    if is_at_end or not admission.has_draws(groups):
        return "paused"
    num_running, num_slots = sum(len(one.outstanding) for one in usable), sum(one.num_slots for one in usable)
    is_awaited = state.trainer.requested is not None and state.trainer.requested > state.trainer.shipped
    if is_awaited:
        return "starved" if num_running >= num_slots else "balanced"
    candidate = None if state.settings.bound == 0 else removable(state)
    if candidate is None or admission.may_start_group(state.settings, groups, state.workers.newest):
        return "balanced"
    return "blocked" if num_running <= num_slots - candidate.num_slots else "balanced"


def own_workers(state: RunState) -> list[Worker]:
    """Workers that the run started and that work, or will when they are restarted."""
    return [
        one for one in state.workers.values() if not one.is_external and not one.is_gone and not one.is_draining
    ]  # fmt: skip


def removable(state: RunState) -> Worker | None:
    """The worker that would be removed: the newest that works and evaluates nothing."""
    able = [worker for worker in own_workers(state) if worker.is_usable and worker.weights.pin is None]
    return able[-1] if len(able) > 1 else None


def _is_replaying(state: RunState) -> bool:
    """Whether the trainer starts, or trains recorded batches again."""
    return state.trainer.trained < max(state.trainer.version, 0)


def _account(scaling: ScalingState, rule: ScalingRule, now_s: float) -> None:
    elapsed_s, scaling.seen_s = now_s - scaling.seen_s, now_s
    if not elapsed_s <= rule.window_s:  # the first call, or the controller was suspended: nothing is known
        scaling.begin_window()
        scaling.streak = 0
    elif scaling.condition == "starved":
        scaling.starved_s += elapsed_s
    elif scaling.condition == "blocked":
        scaling.blocked_s += elapsed_s
    elif scaling.condition == "balanced":
        scaling.balanced_s += elapsed_s


def _has_taken_effect(state: RunState, scaling: ScalingState) -> bool:
    """Whether the last change is complete: the decided number of workers, all with a version. After its deadline it
    counts as failed."""
    if scaling.wanted is None:
        return True
    own = own_workers(state)
    is_done = len(own) == scaling.wanted and all(worker.weights.version >= 0 or not worker.is_present for worker in own)
    if not is_done and state.now_s < scaling.wanted_due_s:
        return False
    scaling.wanted, scaling.wanted_due_s = None, math.inf
    scaling.begin_window()
    return True


def _decide(state: RunState, rule: ScalingRule, scaling: ScalingState) -> None:
    verdict = _verdict(rule, scaling)
    scaling.begin_window()
    is_same = verdict.direction * scaling.streak > 0
    scaling.streak = scaling.streak + verdict.direction if is_same else verdict.direction
    if abs(scaling.streak) != rule.windows:
        return  # not long enough; or longer, at a limit that was noted
    count = len(own_workers(state))
    words = f"{verdict.text} in each of the last {rule.windows} windows of {rule.window_s:g} s"
    if verdict.direction > 0:
        if count >= rule.max_workers:
            state.note("scale_limit", f"{words}, but there are rollout.autoscale.max_workers ({rule.max_workers})")
            return
        state.emit(AddWorker(max_workers=rule.max_workers))
        state.note("scaled", f"a rollout worker is added ({count} -> {count + 1}): {words}")
        scaling.want(count + 1, state.now_s + rule.settle_s)
        return
    worker = removable(state)
    if worker is None or count <= rule.min_workers:
        return
    state.emit(RetireWorker(worker=worker.name, incarnation=worker.incarnation))
    state.note("scaled", f"{worker.name} is removed ({count} -> {count - 1}): {words}")
    scaling.want(count - 1, state.now_s + rule.settle_s)


def _verdict(rule: ScalingRule, scaling: ScalingState) -> Verdict:
    total_s = scaling.starved_s + scaling.blocked_s + scaling.balanced_s
    starved, blocked = scaling.starved_s / total_s, scaling.blocked_s / total_s
    if starved >= rule.add_at:
        return Verdict(1, f"the trainer waited for samples at least {rule.add_at:.0%} of the time (last {starved:.0%})")
    if blocked >= rule.remove_at:
        text = f"the staleness bound left a worker without work at least {rule.remove_at:.0%} of the time"
        return Verdict(-1, f"{text} (last {blocked:.0%})")
    return Verdict(0)
