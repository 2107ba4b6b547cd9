"""The section `launch.ray`: where processes of `launch.kind: ray` may sit, and how the controller is reached there.

Owns: the keys. Refuses: importing ray, judging combinations (validate_cluster.py), arithmetic (pools.py).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like.config import Settings

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class PoolSettings(Settings):
    """What each process of a pool takes from its node, and how the pool lies on the nodes."""

    cpus: float | None = Field(None, ge=0)
    """CPUs that Ray sets aside for each process; null: its compute threads (reward: its scoring processes)."""
    gpus: float | None = Field(None, ge=0)
    """GPUs for each process; null: 1 where its device is cuda (rollout with SGLang: `tp_size`), else 0."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Resources of your own, as in `ray start --resources`: they tie the pool to nodes that have them."""
    strategy: Strategy = "PACK"
    """Ray's placement strategy: few nodes (PACK), many (SPREAD), exactly one, or one for each process (STRICT_...)."""


class RaySettings(Settings):
    """For `launch.kind: ray` (extra `[ray]`): one placement group per pool, on a cluster that runs already."""

    address: str = Field("auto", min_length=1)
    """The cluster's GCS, host:port; `auto`: RAY_ADDRESS, or the cluster this machine belongs to."""
    host: str | None = None
    """Address the controller binds and advertises; null: that of its node in the cluster."""
    rollout: PoolSettings = PoolSettings(strategy="SPREAD")
    """The rollout workers, one process each."""
    trainer: PoolSettings = PoolSettings()
    """The trainer's ranks; the starting model is prepared in the place of the first."""
    reward: PoolSettings = PoolSettings()
    """The reward services; their scoring processes run beside them."""
    placement_timeout_s: float = Field(60.0, gt=0)
    """Time for Ray to set all the places aside, before the run is given up."""
    node_wait_s: float = Field(900.0, gt=0)
    """A process whose node died waits so long for room on another; no restart is spent on that. Then a rollout worker
    stays away, and without its trainer the run ends, for `areal-like resume`."""
    local_dir: str | None = None
    """Folder on the controller's own disk that the ledger is written in while the run lasts; null: the folder for
    temporary files. It is no network file system: SQLite's write-ahead log does not work on one."""
    mirror_every_s: float = Field(30.0, gt=0)
    """Seconds between copies of the ledger into the run folder; one more follows every checkpoint, and the end."""
    max_clock_skew_s: float = Field(5.0, gt=0)
    """A node whose clock is further off is refused: timeline and logs would not line up."""
