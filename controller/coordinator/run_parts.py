"""The named parts of the coordinator's memory, each with what belongs together.

Owns: the fields and what follows from those of one part. Refuses: policy, effects, the leases (run_state.py).
A module that needs one part takes that part; one that emits effects takes the whole `RunState`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from areal_like.trajectory import NO_VERSION
from controller.coordinator.draws import Draws
from controller.coordinator.effects import EndStatus, SendBatch
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.groups import GroupTable
from controller.coordinator.handover import Turn
from controller.coordinator.length_estimator import LengthStatistics
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchGroup


@dataclass(slots=True)
class Rewrite:
    """How often a version was written again."""

    version: int
    lineage: str
    count: int = 0
    """Rewrites asked for."""
    num_unanswered: int = 0
    """Requests without an answer, expired ones included."""
    due_s: float = math.inf
    """When the trainer must have answered; infinite: nothing is under way."""


@dataclass(slots=True)
class TrainerState:
    """The trainer: what it has published, what it was given, and what it replays."""

    lineage: str = ""
    lineages: set[str] = field(default_factory=set)
    """Of this life of the run: one more than its trainer was started again."""
    num_lineages: int = 0
    """Recorded before this life."""
    base: int = 0
    """Version the trainer started this life of its own from."""
    version: int = NO_VERSION
    """Newest published, by whatever life of the trainer."""
    version_lineage: str = ""
    manifest_path: str = ""
    """Empty while the newest version is not available: the trainer that published it is dead."""
    rewrite: Rewrite | None = None
    """Of the newest version, where its files were found damaged."""
    trained: int = NO_VERSION
    """What the trainer is at: below `version` while it replays, NO_VERSION until it has spoken."""
    shipped: int = 0
    """Last step whose batch is recorded."""
    sent: int = 0
    """Highest step given to the trainer in this life."""
    requested: int | None = None
    replay_until: int = 0
    """Steps up to here were recorded in earlier lives."""
    recorded: dict[int, tuple[BatchGroup, ...]] = field(default_factory=dict)
    """Batches by step, until the trainer has published the version that follows from them."""
    replayed: set[int] = field(default_factory=set)
    checkpoints: list[int] = field(default_factory=list)

    @property
    def next_step(self) -> int:
        """The step whose batch is formed next."""
        return self.shipped + 1

    @property
    def is_busy(self) -> bool:
        """A version is still to come from batches the trainer has."""
        return self.trained < max(self.sent, self.base)


@dataclass(slots=True)
class DeviceState:
    """Devices that engines and trainer share (`placement: colocated`)."""

    turn: Turn = Turn.SETUP
    step: int = 0
    """Whose batch the last turn of the trainer was prepared for; 0: that trainer is dead."""
    held_batch: SendBatch | None = None
    """For the trainer, once no engine has memory."""
    num_release_requests: int = 0


@dataclass(slots=True)
class GroupState:
    """Groups: those that live, and how the others ended."""

    table: GroupTable
    draws: Draws
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
    """Why the first answer without a score has none, since a group was last kept."""
    consecutive_failures: Counter[str] = field(default_factory=Counter)
    """Fates of the groups that ended in a row without one being kept."""
    has_kept: bool = False
    last_rejection: str = ""

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
    """What choosing a worker remembers between two events."""

    lengths: LengthStatistics
    last_served: int = -1
    """Place of the worker served last, under round_robin."""
    recalls: dict[int, float] = field(default_factory=dict)
    """Leases asked back and not yet here, with the time until which others wait for them."""
    next_migration_s: float = 0.0


@dataclass(slots=True)
class VersionCheck:
    """When workers are looked at next for what they must load and whether they are late.

    With hundreds of workers this is not done after every event.
    """

    is_due: bool = True
    """Something happened after which workers may have to be notified of a version, or judged."""
    due_s: float = 0.0
    """When one of them is late, or may be tried again."""


@dataclass(slots=True)
class EvaluationState:
    """Evaluations: those under way, and the results."""

    jobs: list[EvalJob] = field(default_factory=list)
    done: dict[int, tuple[float | None, ...]] = field(default_factory=dict)
    """By version; the values are empty where an earlier life found them."""


@dataclass(slots=True)
class EndingState:
    """How the run ends, and how far it has got with that."""

    last_step: int = 0
    status: EndStatus = "completed"
    reason: str = ""
    is_trainer_notified: bool = False
    is_final_eval_made: bool = False
