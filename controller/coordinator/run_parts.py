"""The named parts of the coordinator's state.

Each part contains its fields and values derived from them; leases are in run_state.py.
A module that needs one part is given that part; a module that emits effects is given the whole `RunState`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from areal_like.trajectory import NO_VERSION
from controller.coordinator.draws import Draws
from controller.coordinator.effects import EndStatus, SendBatch
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.groups import GroupTable
from controller.coordinator.handover import Turn
from controller.coordinator.length_estimator import LengthStatistics
from controller.coordinator.replay_buffer import ReplayBuffer
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchRecord


@dataclass(slots=True)
class Rewrite:
    """Rewrites of one version."""

    version: int
    lineage: str
    count: int = 0
    """Number of requested rewrites."""
    num_unanswered: int = 0
    """Number of requests without an answer, including expired ones."""
    due_s: float = math.inf
    """Deadline of the trainer's answer; infinite: no rewrite is in progress."""


@dataclass(slots=True)
class TrainerState:
    """State of the trainer: published version, sent batches, and replay."""

    lineage: str = ""
    lineages: set[str] = field(default_factory=set)
    """Lineages of this session: one more than the number of trainer restarts."""
    num_lineages: int = 0
    """Lineages recorded before this session."""
    base: int = 0
    """Version that the present trainer process started from."""
    version: int = NO_VERSION
    """Newest version published by any trainer process."""
    version_lineage: str = ""
    manifest_path: str = ""
    """Empty while the newest version is not available, because the trainer that published it is lost."""
    rewrite: Rewrite | None = None
    """Rewrites of the newest version, if its files were found damaged."""
    trained: int = NO_VERSION
    """Version the trainer has reached: below `version` while it replays, NO_VERSION before its first message."""
    shipped: int = 0
    """Last step whose batch is recorded."""
    sent: int = 0
    """Highest step sent to the trainer in this session."""
    requested: int | None = None
    replay_until: int = 0
    """Last step that was recorded in earlier sessions."""
    recorded: dict[int, BatchRecord] = field(default_factory=dict)
    """Batches by step, until the trainer has published the version trained on them."""
    replayed: set[int] = field(default_factory=set)
    checkpoints: list[int] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """The step whose batch is selected next."""
        return self.shipped + 1

    @property
    def is_busy(self) -> bool:
        """Whether the trainer has batches whose version is not published yet."""
        return self.trained < max(self.sent, self.base)


@dataclass(slots=True)
class DeviceState:
    """Devices that engines and trainer share (`placement: colocated`)."""

    turn: Turn = Turn.SETUP
    step: int = 0
    """Step of the batch prepared for the trainer's last turn; 0: that trainer is lost."""
    held_batch: SendBatch | None = None
    """Effects for the trainer, sent once no engine has memory."""
    num_release_requests: int = 0


@dataclass(slots=True)
class GroupState:
    """Live groups, and counts of the outcomes of all others."""

    table: GroupTable
    draws: Draws
    replay_buffer: ReplayBuffer
    num_drawn: int = 0
    num_consumed: int = 0
    num_filtered: int = 0
    num_vacant: int = 0
    """Places of steps that took fewer groups than they could (`dynamic_batch`)."""
    num_failed: int = 0
    """Groups that were filtered or failed since the newest step was formed, in this life."""
    dropped: Counter[str] = field(default_factory=Counter)
    num_samples_finished: int = 0
    first_failure: str = ""
    """Reason of the first answer without a score since a group was last kept."""
    consecutive_failures: Counter[str] = field(default_factory=Counter)
    """Fates of the groups that ended in a row without one being kept."""
    has_kept: bool = False
    last_rejection: str = ""
    last_refusal: str = ""
    """Why a safety stage refused the prompt of a group, the last time."""
    last_loss: str = ""
    """Why a sample of the last group that was lost too often was lost; empty if its workers were."""

    @property
    def num_started(self) -> int:
        """Groups running, waiting or consumed, and places that no group will take (`bounded-admission`)."""
        return self.num_consumed + self.num_vacant + len(self.table.live)

    def is_exhausted(self, settings: CoordinatorSettings) -> bool:
        """True where the next step takes what is ready: enough groups were tried for it."""
        if settings.max_attempts is None or self.table.num_ready < settings.least_groups:
            return False
        return self.num_failed + self.table.num_ready >= settings.max_attempts


@dataclass(slots=True)
class RoutingState:
    """State of routing between two events."""

    lengths: LengthStatistics
    last_served: int = -1
    """Index of the worker served last, under round_robin."""
    recalls: dict[int, float] = field(default_factory=dict)
    """Recalled leases that have not returned yet, with the time until which the next wave waits for them."""
    next_migration_s: float = 0.0


Condition = Literal["starved", "blocked", "balanced", "paused"]
"""What holds for the number of workers (autoscaling.py)."""


@dataclass(slots=True)
class ScalingState:
    """State of autoscaling between two events; times of the present window by condition."""

    condition: Condition = "paused"
    """The condition since the last event."""
    seen_s: float = -math.inf
    """Time of the last event."""
    starved_s: float = 0.0
    blocked_s: float = 0.0
    balanced_s: float = 0.0
    streak: int = 0
    """Number of windows in a row with the same result; negative if a worker is not needed."""
    wanted: int | None = None
    """Number of workers that was decided; None: it was reached."""
    wanted_due_s: float = math.inf
    """After this time the decision counts as failed."""

    def begin_window(self) -> None:
        """Begin a new window."""
        self.starved_s = self.blocked_s = self.balanced_s = 0.0

    def want(self, count: int, due_s: float) -> None:
        """Record a decision."""
        self.wanted, self.wanted_due_s, self.streak = count, due_s, 0


@dataclass(slots=True)
class VersionCheck:
    """When workers are next checked for versions to load and missed deadlines.

    With hundreds of workers this is not done after every event.
    """

    is_due: bool = True
    """Set by events after which workers may have to be notified of a version, or checked."""
    due_s: float = 0.0
    """Time of the next deadline or retry."""


@dataclass(slots=True)
class EvaluationState:
    """Evaluations in progress, and results."""

    jobs: list[EvalJob] = field(default_factory=list)
    done: dict[int, tuple[float | None, ...]] = field(default_factory=dict)
    """Results by version; the values are empty if they are from an earlier session."""


@dataclass(slots=True)
class EndingState:
    """How the run ends, and the progress of the shutdown."""

    last_step: int = 0
    status: EndStatus = "completed"
    reason: str = ""
    is_trainer_notified: bool = False
    is_final_eval_made: bool = False
