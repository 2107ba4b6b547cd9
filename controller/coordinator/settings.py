"""Settings of the coordinator, derived from RunConfig by controller/wiring, with their checks.

A run passes the values of its configuration; a test keeps the defaults equal to the configuration's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_like.staleness import OVER_AGE, Mode, OnStale, OverAgePolicy, bound_of
from controller.coordinator.events import EvalKind, OnFailure, RoutingPolicy
from controller.coordinator.replay_buffer import ReplayLimits


class ScalingRule(msgspec.Struct, frozen=True, kw_only=True):
    """`rollout.autoscale`; times in seconds."""

    min_workers: int = 1
    max_workers: int
    window_s: float = 30.0
    windows: int = 3
    add_at: float = 0.3
    remove_at: float = 0.6
    settle_s: float = 600.0
    """Longest time until a decision has taken effect; then it counts as failed."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers or self.window_s <= 0 or self.windows < 1:
            raise ValueError(
                "min_workers, max_workers, window_s and windows must be positive, and min_workers not larger"
            )


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the pure coordinator; times in seconds."""

    groups_per_step: int
    group_size: int
    num_steps: int
    passes_per_batch: int = 1
    """Setting of the trainer; only recorded."""
    mode: Mode = "async"
    max_staleness: int | None = 4
    """None: unbounded. The mode may determine a different value (`bound`)."""
    on_stale: OnStale = "wait"
    group_timeout_s: float = 1800.0
    """Maximum time from a group's first lease (in this session) to its last verdict; then it is dropped with reason
    `timeout`.
    """
    on_failure: OnFailure = "drop_sample"
    """Handling of a missing score; a number is used as the reward."""
    on_failure_of: dict[str, OnFailure] = {}
    """Handling of missing scores of single scorers, by name."""
    has_reward_service: bool = True
    """Whether a reward service gives the verdicts; otherwise the workflow does, and there is no log of a service."""
    filter_zero_signal: bool = False
    max_attempts: int | None = None
    """A step takes the groups that are ready once so many were tried for it (`dynamic_batch`); None: always
    groups_per_step."""
    min_groups: int = 1
    """With max_attempts: the least that a step takes."""
    replay: ReplayLimits | None = None
    """Groups of earlier steps that a step reuses (`replay_buffer`); None: none."""
    max_filtered_batches: int = 10
    """After this many batches' worth of groups in a row without one that is kept, the run ends with advice. 0:
    never.
    """
    max_draws: int | None = None
    """epochs * rows; None: endless."""
    num_workers: int = 1
    """Expected number of rollout workers."""
    routing: RoutingPolicy = "least_tokens"
    affinity: float = 1.0
    """A group's samples stay on one worker while it is at most this many groups' expected work behind the least loaded
    one.
    """
    migration: bool = True
    min_gain_s: float = 2.0
    """A migration must reduce the longest wait by this much."""
    queue_samples: int = 0
    """Part of a worker's capacity beyond the slots of its engine; 0: half of it."""
    max_new_tokens: int = 1024
    """Maximum length of an answer; used for estimates before any length is known."""
    num_eval_rows: int = 0
    """Rows of the baseline and the final evaluation; 0: no evaluation."""
    num_periodic_eval_rows: int | None = None
    """Number of rows of a periodic evaluation, from the first; None: all."""
    eval_every_steps: int = 0
    """0: no periodic evaluation."""
    eval_at_start: bool = True
    eval_at_end: bool = True
    is_colocated: bool = False
    """Engines and trainer share devices, and each releases its memory for the other (colocation.py)."""
    keep_checkpoints: int = 2
    """Payloads are only purged when the oldest of this many newest checkpoints covers them."""
    max_sample_losses: int = 8
    """A sample lost more often than this, with its worker or because its teacher did not answer, drops its group with
    reason `lost_too_often`."""
    load_retry_s: float = 5.0
    """A quarantined worker is notified of the newest version again after this long ..."""
    max_load_attempts: int = 4
    """... at most this often per version."""
    swap: Literal["together", "rolling"] = "together"
    """`rolling`: workers swap in the staged version one after another."""
    load_deadline_s: float = 120.0
    """Deadline to stage an announced version, and to swap it in when its turn is granted; after it the worker is
    quarantined until it has done so.
    """
    autoscale: ScalingRule | None = None
    """None: the number of workers changes by request only."""
    drain_s: float = 0.0
    """Part of the deadline in which a worker first finishes its running answers (`interruption: drain`)."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.group_size < 1 or self.num_steps < 0 or self.num_workers < 1:
            raise ValueError(
                "groups_per_step, group_size and num_workers must be positive, and num_steps must not be negative"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError("max_staleness must not be negative")
        if self.replay is not None and self.is_strict and self.replay.max_age > (self.bound or 0):
            raise ValueError("the maximum age of reused groups must not exceed the staleness bound")
        if not 0 <= self.drain_s < self.load_deadline_s:
            raise ValueError("drain_s must not be negative, and must be less than load_deadline_s")

    @property
    def least_groups(self) -> int:
        """The least that a step takes."""
        return self.groups_per_step if self.max_attempts is None else min(self.min_groups, self.groups_per_step)

    @property
    def idle_load_deadline_s(self) -> float:
        """load_deadline_s for a worker without running answers."""
        return self.load_deadline_s - self.drain_s

    @property
    def bound(self) -> int | None:
        """Largest allowed staleness; None: unbounded."""
        return bound_of(self.mode, self.max_staleness)

    def slots_of(self, capacity: int) -> int:
        """Answers that a worker of this capacity generates at once, without the queue that rollout/worker.py adds."""
        queue = self.queue_samples or capacity // 2
        return max(1, capacity - queue)

    def num_rows(self, kind: EvalKind) -> int:
        """Rows of an evaluation of this kind."""
        if kind != "periodic" or self.num_periodic_eval_rows is None:
            return self.num_eval_rows
        return min(self.num_periodic_eval_rows, self.num_eval_rows)

    @property
    def over_age(self) -> OverAgePolicy:
        """Handling of groups past their deadline."""
        return OVER_AGE[self.on_stale]

    @property
    def is_strict(self) -> bool:
        """Whether no group may be used past its deadline (`bounded-staleness`)."""
        return self.bound is not None and self.over_age.is_strict

    @property
    def min_scored(self) -> int:
        """Scored samples that a complete group needs: 2, or 1 if group_size is 1."""
        return min(2, self.group_size)
