"""When and how a run ends: completed, out of data, stopped, or unable to continue. Every end has a reason.

Decides the last steps: notification of the trainer, checkpoint, final evaluation, EndRun. Processes are ended by the
shell.
"""

from __future__ import annotations

from areal_like.verdict import REFUSED
from controller.coordinator import evaluation
from controller.coordinator.admission import has_draws
from controller.coordinator.effects import EndRun, EndStatus, SendNoMoreBatches
from controller.coordinator.run_parts import GroupState
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.usable_workers import has_no_usable_workers


def begin(state: RunState, status: EndStatus, reason: str) -> None:
    """Stop handing out work. Completed and exhausted runs use every recorded batch, others only the current step."""
    trainer, ending = state.trainer, state.ending
    if state.phase is not Phase.RUNNING:
        return
    state.phase = Phase.FINISHING
    ending.status, ending.reason = status, reason
    if status in ("completed", "exhausted"):
        ending.last_step = max(trainer.base, min(trainer.shipped, state.settings.num_steps))
    else:
        # The current step is finished, because a partial step cannot be saved; a batch that was only sent is not
        # started.
        ending.last_step = max(trainer.base, min(trainer.sent, trainer.trained + 1))
        for job in list(state.evaluations.jobs):
            evaluation.drop(state, job, f"the run ends: {reason}")
        _tell_trainer(state)


def advance(state: RunState) -> None:
    """Check for a reason to end, and advance the shutdown."""
    if state.phase is Phase.RUNNING:
        _check_end_conditions(state)
    if state.phase is Phase.FINISHING:
        _advance_shutdown(state)


def _check_end_conditions(state: RunState) -> None:
    trainer, groups = state.trainer, state.groups
    settings = state.settings
    if trainer.shipped >= settings.num_steps:
        if trainer.version >= settings.num_steps or (trainer.requested or 0) > settings.num_steps:
            begin(state, "completed", f"{settings.num_steps} steps done")
    elif not has_draws(groups) and len(groups.table.live) < settings.groups_per_step:
        begin(
            state,
            "exhausted",
            f"the data is used up: {groups.num_drawn} groups drawn, {len(groups.table.live)} left, but a step needs "
            f"{settings.groups_per_step}; raise data.epochs for more steps",
        )
    elif (reason := no_usable_group_reason(settings, groups)) or (reason := no_workers_reason(state)):
        begin(state, "failed", reason)


def no_usable_group_reason(settings: CoordinatorSettings, groups: GroupState) -> str:
    """Why groups no longer yield training data, with advice; empty while some do."""
    total = groups.consecutive_failures.total()
    if not total or total < settings.groups_per_step:
        return ""
    # Refused prompts say nothing about the others, and come back before the first answer is complete.
    rejected, refused = groups.consecutive_failures["rejected"], groups.consecutive_failures["refused"]
    if not groups.has_kept and rejected >= settings.groups_per_step and rejected + refused == total:
        return f"all of the first {rejected} prompts were rejected: {groups.last_rejection}"
    if not settings.max_filtered_batches or total < settings.max_filtered_batches * settings.groups_per_step:
        return ""
    fate, number = groups.consecutive_failures.most_common(1)[0]
    advice = _ADVICE.get(fate, _ADVICE["verdict"] if fate.startswith("verdict") else "see the controller's log")
    is_unscored = fate == "too_few_scores" or fate.startswith("verdict")
    if is_unscored and not settings.has_reward_service:
        advice = _NO_REWARD_ADVICE
    if is_unscored and groups.first_failure.partition(",")[0] == REFUSED:
        advice = _ADVICE["refused"]
    if groups.first_failure and is_unscored:
        advice = f"{advice}; the first failure: {groups.first_failure}"
    if fate == "rejected" and groups.last_rejection:
        advice = f"{advice}; the last reason: {groups.last_rejection}"
    if fate == "refused" and groups.last_refusal:
        advice = f"{advice}; the last reason: {groups.last_refusal}"
    if fate == "lost_too_often" and groups.last_loss:
        advice = f"their samples were returned again and again; the last reason: {groups.last_loss}"
    listed = ", ".join(f"{count} {name}" for name, count in groups.consecutive_failures.most_common())
    return f"{total} groups in a row ended without a usable one ({listed}); most were {fate} ({number}): {advice}"


_ADVICE = {
    "filtered": (
        "all samples of a group get the same reward; use easier or harder prompts, a larger group_size, "
        "a higher sampling.temperature, or check the reward"
    ),
    "timeout": "answers take longer than staleness.group_timeout_s; raise it or lower sampling.max_new_tokens",
    "too_few_scores": "scoring fails; see the log of the reward service, and reward.timeout_s",
    "verdict": "scoring fails; see the log of the reward service, and reward.timeout_s",
    "rejected": (
        "prompts do not fit the model's context (raise rollout.engine.max_context or shorten them), or a workflow or "
        "model failed"
    ),
    "refused": "safety stages refuse prompts or answers; change rollout.safety, or clean the rows of data.train",
    "lost_too_often": "rollout workers crash while they generate these samples; see their logs",
}

_NO_REWARD_ADVICE = "the workflow gives no reward; see rollout.workflow_options, and the logs of the rollout workers"
"""Advice for too_few_scores and verdicts without a reward service."""


def no_workers_reason(state: RunState) -> str:
    """Why no rollout worker can work again although a batch is requested; empty while one may."""
    trainer = state.trainer
    workers = state.workers.values()
    if trainer.requested is None or trainer.requested <= trainer.shipped or not has_no_usable_workers(state):
        return ""
    if trainer.is_busy and any(worker.weights.quarantine and worker.is_present for worker in workers):
        return ""  # a new version is on its way and may be loadable
    causes = "; ".join(f"{w.name}: {w.weights.quarantine if w.is_present else 'lost'}" for w in workers)
    return f"no rollout worker is left for batch {trainer.requested} ({causes})"


def trainer_died(state: RunState) -> None:
    """Handle the loss of the trainer during the shutdown: a stopped run ends with the checkpoint that the trainer would
    start from.
    """
    if state.ending.status not in ("completed", "exhausted"):
        state.ending.last_step = state.trainer.base


def _tell_trainer(state: RunState) -> None:
    ending = state.ending
    ending.is_trainer_notified = True
    state.emit(SendNoMoreBatches(last_step=ending.last_step, reason=ending.reason))


def _advance_shutdown(state: RunState) -> None:
    trainer, ending = state.trainer, state.ending
    if trainer.requested is not None and trainer.requested > ending.last_step:
        trainer.requested = None
        _tell_trainer(state)
    elif not ending.is_trainer_notified and trainer.trained >= ending.last_step:
        _tell_trainer(state)
    is_orderly = ending.status in ("completed", "exhausted")
    # A run stopped before its first step waits for nothing: the trainer may not have started yet.
    if trainer.trained < ending.last_step and (is_orderly or ending.last_step > trainer.base):
        return
    if is_orderly and not ending.is_final_eval_made:
        ending.is_final_eval_made = True
        for group in state.groups.table.live.values():
            state.cancel([state.leases[lease_id] for lease_id in sorted(group.lease_ids)])
        evaluation.request_final(state)
        evaluation.advance(state)
    if state.evaluations.jobs and has_no_usable_workers(state):
        for job in list(state.evaluations.jobs):
            evaluation.drop(state, job, "no rollout worker is left")
    is_saved = ending.last_step <= trainer.base or any(version >= ending.last_step for version in trainer.checkpoints)
    if is_saved and not state.evaluations.jobs:
        state.phase = Phase.OVER
        state.emit(EndRun(status=ending.status, reason=ending.reason))
