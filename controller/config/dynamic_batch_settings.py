"""Settings of the section dynamic_batch."""

from __future__ import annotations

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings


class DynamicBatchSettings(Settings):
    """A bound on what the groups of one step may cost (dynamic sampling of DAPO, arXiv 2503.14476, with a maximum): a
    step takes the groups that carry a signal as soon as there are groups_per_step of them, or as soon as max_attempts
    groups have been tried."""

    max_attempts: int = Field(gt=0, le=limits.GROUPS)
    """Groups tried for a step: those that are ready for it, and those that were filtered or failed since the step
    before."""
    min_groups: int = Field(1, gt=0, le=limits.GROUPS)
    """Smallest number of groups of a step; the step waits for them regardless of the number of attempts."""
