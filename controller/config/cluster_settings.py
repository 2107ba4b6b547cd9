"""The section `launch.ray`: where processes of `launch.kind: ray` may be placed, and how they reach the controller.

ray is not imported. Combinations are checked in validation/launcher.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class PoolSettings(Settings):
    """Resources of each process of a pool, and the placement of the pool on the nodes."""

    cpus: float | None = Field(None, ge=0, le=limits.DEVICES)
    """CPUs that Ray reserves for each process; null: its compute threads (reward: its scoring processes)."""
    gpus: float | None = Field(None, ge=0, le=limits.DEVICES)
    """GPUs for each process; null: 1 where its device is cuda (rollout with SGLang: `tp_size`), else 0."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources, as in `ray start --resources`: they restrict the pool to nodes that have them."""
    strategy: Strategy = "PACK"
    """Ray's placement strategy: few nodes (PACK), many (SPREAD), exactly one, or one for each process (STRICT_...)."""


class RolloutPoolSettings(PoolSettings):
    """Rollout workers need not be close to each other."""

    strategy: Strategy = "SPREAD"
    """Ray's placement strategy: few nodes (PACK), many (SPREAD), exactly one, or one for each process (STRICT_...)."""


class RaySettings(Settings):
    """For `launch.kind: ray` (extra `[ray]`): one placement group per pool, on an existing cluster."""

    address: str = Field("auto", min_length=1)
    """The cluster's GCS, host:port; `auto`: RAY_ADDRESS, or the cluster this machine belongs to."""
    host: str | None = None
    """Address the controller binds and advertises; null: that of its node in the cluster."""
    rollout: RolloutPoolSettings = RolloutPoolSettings()
    """The rollout workers, one process each."""
    trainer: PoolSettings = PoolSettings()
    """The trainer's ranks; the starting model is prepared in the placement of the first."""
    reward: PoolSettings = PoolSettings()
    """The reward services; their scoring processes run on the same node."""
    placement_timeout_s: float = Field(60.0, gt=0, le=limits.SECONDS)
    """Time for Ray to reserve all placements before the run fails."""
    node_wait_s: float = Field(900.0, gt=0, le=limits.SECONDS)
    """A process whose node failed waits this long for resources on another node; this does not count as a restart.
    After that a rollout worker is not restarted, and without its trainer the run ends (continue with `areal-like
    resume`).
    """
    local_dir: str | None = None
    """Folder on the controller's own disk that the ledger is written to during the run; null: the folder for
    temporary files. It must not be a network file system: SQLite's write-ahead log does not work on one."""
    mirror_every_s: float = Field(30.0, gt=0, le=limits.SECONDS)
    """Seconds between copies of the ledger into the run folder; one more follows every checkpoint and
    the end of the run."""
    max_clock_skew_s: float = Field(5.0, gt=0, le=limits.SECONDS)
    """Maximum difference between a node's clock and the controller's. Nodes beyond it are rejected, because timeline
    and logs would be inconsistent.
    """
