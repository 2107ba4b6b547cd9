"""Settings of the section replay_buffer."""

from __future__ import annotations

from pydantic import Field

from areal_like import limits
from areal_like.settings import Settings


class ReplayBufferSettings(Settings):
    """Groups of earlier steps that a step trains on again, in addition to its own (experience replay)."""

    groups_per_step: int = Field(gt=0, le=limits.GROUPS)
    """Maximum number of groups of earlier steps in a step. Groups that were used least often come first, then the
    newest."""
    max_age: int = Field(gt=0, le=limits.STEPS)
    """Largest staleness of a group in the step that reuses it; within staleness.max_staleness."""
    max_reuses: int = Field(1, gt=0, le=limits.STEPS)
    """Maximum number of times that a group is reused after the step for which it was generated."""
