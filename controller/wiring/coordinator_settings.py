"""Maps the configuration to the settings of the coordinator."""

from __future__ import annotations

import math

from controller.config.launchers import launcher_of
from controller.config.run_config import RunConfig
from controller.coordinator.replay_buffer import ReplayLimits
from controller.coordinator.settings import CoordinatorSettings, ScalingRule

LOAD_GRACE_S = 5.0
"""Margin of the controller's deadline, so that the worker, which knows what it waits for, reports a failed load
first.
"""


def coordinator_settings(
    config: RunConfig, *, max_draws: int | None, num_eval_rows: int, num_periodic_rows: int
) -> CoordinatorSettings:
    """Settings of the coordinator, from the configuration."""
    return CoordinatorSettings(
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        num_steps=config.num_steps,
        passes_per_batch=config.trainer.passes_per_batch,
        mode=config.mode,
        max_staleness=config.staleness.bound,
        on_stale=config.staleness.on_stale,
        # Samples that wait for a client have no deadline; the worker has one for their rewards.
        group_timeout_s=math.inf if config.client_addresses else config.staleness.group_timeout_s,
        on_failure=config.reward.on_failure,
        on_failure_of=config.reward.failure_policies,
        has_reward_service=config.reward.is_needed or bool(config.reward.addresses),
        filter_zero_signal=config.filter_zero_signal,
        max_attempts=None if config.dynamic_batch is None else config.dynamic_batch.max_attempts,
        min_groups=1 if config.dynamic_batch is None else config.dynamic_batch.min_groups,
        replay=None if config.replay_buffer is None else ReplayLimits(**config.replay_buffer.model_dump()),
        max_filtered_batches=config.max_filtered_batches,
        max_draws=max_draws,
        num_workers=config.rollout.num_workers,
        routing=config.rollout.routing.policy,
        affinity=config.rollout.routing.affinity,
        migration=config.rollout.routing.migration,
        min_gain_s=config.rollout.routing.min_gain_s,
        queue_samples=config.rollout.queue_samples,
        max_new_tokens=config.sampling.max_new_tokens,
        num_eval_rows=num_eval_rows,
        num_periodic_eval_rows=num_periodic_rows,
        eval_every_steps=config.eval.every_steps if num_periodic_rows else 0,
        eval_at_start=config.eval.at_start,
        is_colocated=config.is_colocated,
        keep_checkpoints=config.trainer.checkpoint.keep,
        swap=config.trainer.weights.swap,
        load_deadline_s=config.trainer.weights.deadline_s + LOAD_GRACE_S + drain_s(config),
        drain_s=drain_s(config),
        autoscale=_scaling_rule(config),
    )


def _scaling_rule(config: RunConfig) -> ScalingRule | None:
    """A change has taken effect when a new process has a place, has started and has loaded a version."""
    if config.rollout.autoscale is None:
        return None
    launch = config.launch
    start_s = launcher_of(config).node_wait_s(launch) + launch.startup_timeout_s
    settle_s = start_s + config.trainer.weights.deadline_s + LOAD_GRACE_S
    return ScalingRule(**config.rollout.autoscale.model_dump(), settle_s=settle_s)


def drain_s(config: RunConfig) -> float:
    """Seconds in which a worker with `drain` first finishes its running answers; limited by a group's deadline."""
    return config.staleness.group_timeout_s if config.rollout.interruption == "drain" else 0.0
