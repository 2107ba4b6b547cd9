"""Settings of what acts on the staleness of a step. Torch-free."""

from __future__ import annotations

from pydantic import Field

from areal_like.settings import Settings


class LrByEssSettings(Settings):
    """Smaller steps where few answers dominate (VCPO, arXiv 2602.17616): the rate of an update is multiplied by
    (rho / reference)^power, at most 1, where rho is the effective sample size of its answers' importance weights, as a
    share."""

    power: float = Field(0.5, gt=0, le=1)
    """0.5 for optimizers such as AdamW; 1: in proportion."""
    reference: float = Field(1.0, gt=0, le=1)
    """Share from which on the rate is whole: that of a run without staleness, where engine and trainer differ."""
