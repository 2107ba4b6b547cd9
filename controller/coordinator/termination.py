"""When and how a run ends: done, out of data, stopped, or hopeless; every end has a reason.

Owns: the reasons to end, the advice, the last steps (trainer notified, checkpoint, final evaluation, EndRun).
Refuses: ending processes (the shell's).
"""

from __future__ import annotations

from controller.coordinator import evaluation
from controller.coordinator.admission import has_draws
from controller.coordinator.effects import EndRun, EndStatus, SendNoMoreBatches
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.usable_workers import has_no_usable_workers


def begin(state: RunState, status: EndStatus, reason: str) -> None:
    """Hand out no more work. Completed and exhausted runs use every recorded batch, others only the running step."""
    if state.phase is not Phase.RUNNING:
        return
    state.phase = Phase.FINISHING
    state.end_status, state.end_reason = status, reason
    if status in ("completed", "exhausted"):
        state.last_step = max(state.base, min(state.shipped, state.settings.num_steps))
    else:
        state.last_step = max(state.base, min(state.sent, state.trained + 1))
        for job in list(state.eval_jobs):
            evaluation.drop(state, job, f"the run ends: {reason}")
        _tell_trainer(state)


def advance(state: RunState) -> None:
    """Look for a reason to end, and take the next step towards the end."""
    if state.phase is Phase.RUNNING:
        _check_end_conditions(state)
    if state.phase is Phase.FINISHING:
        _advance_shutdown(state)


def _check_end_conditions(state: RunState) -> None:
    settings = state.settings
    if state.shipped >= settings.num_steps:
        if state.version >= settings.num_steps or (state.requested or 0) > settings.num_steps:
            begin(state, "completed", f"{settings.num_steps} steps done")
    elif not has_draws(state) and len(state.table.live) < settings.groups_per_step:
        begin(
            state,
            "exhausted",
            f"the data is used up: {state.num_drawn} groups drawn, {len(state.table.live)} left where a step needs "
            f"{settings.groups_per_step}; raise data.epochs for more steps",
        )
    elif (reason := no_usable_group_reason(state)) or (reason := no_workers_reason(state)):
        begin(state, "failed", reason)


def no_usable_group_reason(state: RunState) -> str:
    """Why no group is fit for training any more, with advice; empty while some are."""
    total, settings = state.consecutive_failures.total(), state.settings
    if not total or total < settings.groups_per_step:
        return ""
    if not state.has_kept and state.consecutive_failures["rejected"] == total:
        return f"all of the first {total} prompts were rejected: {state.last_rejection}"
    if not settings.max_filtered_batches or total < settings.max_filtered_batches * settings.groups_per_step:
        return ""
    fate, number = state.consecutive_failures.most_common(1)[0]
    advice = _ADVICE.get(fate, _ADVICE["verdict"] if fate.startswith("verdict") else "see the controller's log")
    if state.first_failure and (fate == "too_few_scores" or fate.startswith("verdict")):
        advice = f"{advice}; the first failure: {state.first_failure}"
    listed = ", ".join(f"{count} {name}" for name, count in state.consecutive_failures.most_common())
    return f"{total} groups in a row ended without a usable one ({listed}); most were {fate} ({number}): {advice}"


_ADVICE = {
    "filtered": (
        "all samples of a group get the same reward; use easier or harder prompts, a larger group_size, "
        "a higher sampling.temperature, or check the reward"
    ),
    "timeout": "answers take longer than staleness.group_timeout_s; raise it or lower sampling.max_new_tokens",
    "too_few_scores": "scoring fails; see logs/reward.log, and reward.timeout_s",
    "verdict": "scoring fails; see logs/reward.log, and reward.timeout_s",
    "rejected": "prompts do not fit the model's context; raise rollout.engine.max_context or shorten them",
    "lost_too_often": "rollout workers die over these samples; see their logs",
}


def no_workers_reason(state: RunState) -> str:
    """Why no rollout worker will ever work again although a batch is owed; empty while one may."""
    workers = state.workers.values()
    if state.requested is None or state.requested <= state.shipped or not has_no_usable_workers(state):
        return ""
    if state.is_trainer_busy and any(worker.weights.quarantine and worker.is_present for worker in workers):
        return ""  # a new version is on its way and may load
    causes = "; ".join(f"{w.name}: {w.weights.quarantine if w.is_present else 'gone'}" for w in workers)
    return f"no rollout worker is left for batch {state.requested} ({causes})"


def trainer_died(state: RunState) -> None:
    """While the run ends: a stopped one ends with the checkpoint the trainer would start from."""
    if state.end_status not in ("completed", "exhausted"):
        state.last_step = state.base


def _tell_trainer(state: RunState) -> None:
    state.is_trainer_reported = True
    state.emit(SendNoMoreBatches(last_step=state.last_step, reason=state.end_reason))


def _advance_shutdown(state: RunState) -> None:
    if state.requested is not None and state.requested > state.last_step:
        state.requested = None
        _tell_trainer(state)
    elif not state.is_trainer_reported and state.trained >= state.last_step:
        _tell_trainer(state)
    is_orderly = state.end_status in ("completed", "exhausted")
    if state.trained < state.last_step and (is_orderly or state.last_step > state.base):
        return
    if is_orderly and not state.is_final_eval_made:
        state.is_final_eval_made = True
        for group in state.table.live.values():
            state.cancel([state.leases[lease_id] for lease_id in sorted(group.lease_ids)])
        evaluation.request_final(state)
        evaluation.advance(state)
    if state.eval_jobs and has_no_usable_workers(state):
        for job in list(state.eval_jobs):
            evaluation.drop(state, job, "no rollout worker is left")
    is_saved = state.last_step <= state.base or any(version >= state.last_step for version in state.checkpoints)
    if is_saved and not state.eval_jobs:
        state.phase = Phase.OVER
        state.emit(EndRun(status=state.end_status, reason=state.end_reason))
