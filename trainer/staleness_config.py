"""Settings of what acts on the staleness of a step. Torch-free."""

from __future__ import annotations

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings


class LrByEssSettings(Settings):
    """Smaller steps where few answers dominate (VCPO, arXiv 2602.17616): the rate of an update is multiplied by
    (rho / reference)^power, at most 1, where rho is the effective sample size of its answers' importance weights, as a
    share."""

    power: float = Field(0.5, gt=0, le=1)
    """0.5 for optimizers such as AdamW; 1: in proportion."""
    reference: float = Field(1.0, gt=0, le=1)
    """Share from which on the rate is whole: that of a run without staleness, where engine and trainer differ."""


class VersionLogprobsSettings(Settings):
    """Log-probs under the versions that sampled the tokens (arXiv 2605.12070). Each rank keeps its part of the newest
    version whole and of older ones only what differs from their successors, in host memory. It costs a forward pass
    over the answers of each older version in a step."""

    keep: int = Field(8, ge=2, le=1024)
    """Versions kept, the present one included. A token of another one counts as sampled by the policy at the start of
    the step (metric `version_missing_share`)."""
    memory_mb: float = Field(4096.0, gt=0, le=limits.MEGABYTES)
    """Host memory of a rank for older versions, MB; beyond it the oldest go first."""


class GradientCosineSettings(Settings):
    """The metric `gradient_cosine` (GAC, arXiv 2603.01501). A copy of a gradient waits in host memory for a step, 4
    bytes a trained parameter."""

    every_steps: int = Field(10, ge=1, le=limits.STEPS)
    """Steps from one measurement to the next."""
