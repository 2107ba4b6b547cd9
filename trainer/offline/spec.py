"""The spec of `python -m trainer.offline`. Imports no torch, so that the controller can write it."""

from __future__ import annotations

from areal_like.config import ModelSettings, StartSpec
from trainer.offline.config import (
    DpoSettings,
    Objective,
    OfflineDataSettings,
    OfflineEvalSettings,
    OfflineTrainerSettings,
)


class OfflineSpec(StartSpec):
    """The spec of one run from files; `seed` determines the weights of a new model and the order of the rows."""

    name: str = "trainer"
    run_dir: str
    objective: Objective
    model: ModelSettings
    """The starting model."""
    data: OfflineDataSettings
    """Rows; the paths are absolute."""
    epochs: int
    max_steps: int | None
    batch_size: int
    dpo: DpoSettings = DpoSettings()
    trainer: OfflineTrainerSettings
    eval: OfflineEvalSettings
    rank: int = 0
    """Rank of this process; rank 0 writes files."""
    num_ranks: int = 1
    ranks_address: str = ""
    """Where the ranks meet: file:///path."""
    has_own_gpus: bool = False
    """See trainer.ranks.RankSpec."""
