"""Settings of features that respond to the staleness of a step. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings


class LrByEssSettings(Settings):
    """Smaller updates if few answers dominate (VCPO, arXiv 2602.17616): the learning rate of an update is multiplied by
    (rho / reference)^power, at most 1, where rho is the effective sample size of its answers' importance weights, as a
    share."""

    power: float = Field(0.5, gt=0, le=1)
    """0.5 for optimizers such as AdamW; 1: in proportion."""
    reference: float = Field(1.0, gt=0, le=1)
    """The learning rate is not reduced if rho is at least this value. It should be the value of a run without
    staleness, in which only engine and trainer differ."""


class VersionLogprobsSettings(Settings):
    """Log-probs under the versions that sampled the tokens (arXiv 2605.12070). In host memory, each rank keeps its part
    of the newest version in full, and of older ones only the differences from their successors. It costs a forward pass
    over the answers of each older version in a step."""

    keep: int = Field(8, ge=2, le=1024)
    """Versions kept, including the current one. A token of any other counts as sampled by the policy at the start of
    the step (metric `version_missing_share`)."""
    memory_mb: float = Field(4096.0, gt=0, le=limits.MEGABYTES)
    """Host memory of a rank for older versions, MB; above it the oldest are dropped first."""


class GradientCosineSettings(Settings):
    """The metric `gradient_cosine` (GAC, arXiv 2603.01501). A copy of a gradient is kept in host memory for a step, 4
    bytes per trained parameter."""

    every_steps: int = Field(10, ge=1, le=limits.STEPS)
    """Steps from one measurement to the next."""
