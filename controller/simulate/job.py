"""A simulated job (`Job`) and its result (`Outcome`).

The simulation is in world.py, the machines in plan.py.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field

from areal_like.emulation.lengths import Lengths
from areal_like.staleness import Mode, OnStale
from controller.coordinator.events import RoutingPolicy
from controller.coordinator.replay_buffer import ReplayLimits

MAX_LEASES = 1_000_000
"""Number of samples above which a lease is a whole group."""


@dataclass(frozen=True)
class Job:
    """The job to simulate. Fields without defaults are determined by the configuration."""

    groups_per_step: int
    group_size: int
    num_steps: int
    lengths: Lengths
    _: KW_ONLY
    mode: Mode
    max_staleness: int | None
    on_stale: OnStale
    interruption: str
    routing: RoutingPolicy
    affinity: float
    migration: bool
    """Running answers move to idle workers. Not supported if a lease is a whole group."""
    min_gain_s: float
    updates_per_step: int
    passes_per_batch: int = 1
    """Passes over each batch; 1 with costs of a measured run, which already include its passes."""
    replay: ReplayLimits | None = None
    """Groups of earlier steps that each step trains on again; None with costs of a measured run, which already include
    them."""
    prompt_tokens: int = 200
    reward_s: float = 0.0
    seed: int = 1
    heartbeat_s: float = 30.0
    """Seconds between two reports of a worker's speed and tokens, which only migration uses."""
    num_tail_steps: int = 0
    """Last steps that are not counted, because no new groups start at the end of a job."""
    by_group: bool | None = None
    """A lease is a whole group; None: in jobs of more than MAX_LEASES samples."""

    @property
    def mean_length(self) -> float:
        """Estimated mean tokens of an answer."""
        return _mean_length(self.lengths, self.seed)

    @property
    def is_by_group(self) -> bool:
        """Whether a lease is a whole group."""
        if self.by_group is not None:
            return self.by_group
        return self.groups_per_step * self.group_size * self.num_steps > MAX_LEASES


@functools.lru_cache
def _mean_length(lengths: Lengths, seed: int) -> float:
    """Mean length estimated by draws. Cached, because it takes longer than a step of a small job."""
    return lengths.mean_length(seed)


@dataclass(frozen=True)
class Losses:
    """Answers of dropped groups (`on_stale: drop`) against all of the job that were trained on or dropped.

    share, token_share: of answers and of tokens; lengths in tokens, as the answers have or would have had them.
    """

    share: float
    token_share: float
    drawn_mean: float
    trained_mean: float
    drawn_p99: float
    trained_p99: float


@dataclass
class Outcome:
    """Result of a simulation. Times in seconds, after the warm-up (`first_step`)."""

    steps: int
    """Number of steps up to the last counted one."""
    wall_s: float
    """Time from the end of step `first_step` to the end of the last counted step."""
    first_step: int
    total_s: float
    """Time from the job's start to the end of the last counted step."""
    tokens: float
    """Sampled tokens consumed by the counted steps."""
    samples: int
    trainer_wait_share: float
    rollout_idle_share: float
    rollout_paused_share: float
    rollout_prefill_share: float
    train_s: float
    """Mean computing time of a step."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Groups by staleness."""
    imbalance: float = 1.0
    mean_batch: float = 0.0
    """Mean sequences in a worker's batch while it decodes."""
    losses: Losses | None = None
    """None: no group was dropped."""
    generated_per_s: float = 0.0
    """Tokens per second that the workers sample, consumed or not, while they have work."""

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return self.wall_s / max(1, self.steps - self.first_step)

    @property
    def tokens_per_s(self) -> float:
        """Consumed tokens per second."""
        return self.tokens / self.wall_s if self.wall_s > 0 else math.nan

    @property
    def samples_per_s(self) -> float:
        """Consumed samples per second."""
        return self.samples / self.wall_s if self.wall_s > 0 else math.nan

    @property
    def staleness_mean(self) -> float:
        """Mean staleness over groups."""
        total = self.staleness.total()
        return sum(value * count for value, count in self.staleness.items()) / total if total else math.nan
