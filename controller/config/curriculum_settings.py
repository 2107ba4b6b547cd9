"""Settings of the section data.curriculum."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from areal_like import limits
from areal_like.settings import Settings


class Band(Settings):
    """Rows whose success rate is at most `up_to`, and above that of the band before."""

    up_to: float = Field(ge=0, le=1)
    """Highest success rate of the band."""
    keep: float = Field(gt=0, le=1)
    """Probability with which a position of such a row is used. Must be above 0: a row that is never drawn cannot show
    that it has become useful.
    """


class CurriculumSettings(Settings):
    """Skips positions of the draw order by the recent success rate of their row. Rows that have not been tried yet are
    always used.
    """

    success_reward: float = 1.0
    """An answer with at least this reward is a success."""
    memory: int = Field(2, gt=0, le=limits.STEPS)
    """Number of the newest groups of a row that count, from any epoch."""
    bands: tuple[Band, ...] = (Band(up_to=0.0, keep=0.25), Band(up_to=0.999, keep=1.0), Band(up_to=1.0, keep=0.25))
    """In ascending order of `up_to`; the last one ends at 1. The default skips three of four draws of rows that are
    never or always solved.
    """

    @model_validator(mode="after")
    def _bands_cover_all_rates(self) -> Self:
        ends = [band.up_to for band in self.bands]
        if not ends or ends[-1] != 1.0:
            raise ValueError("the last band must have `up_to: 1.0`")
        if ends != sorted(set(ends)):
            raise ValueError(
                "the values of `up_to` must be strictly increasing, but they are "
                f"{', '.join(f'{end:g}' for end in ends)}"
            )
        return self

    def keep(self, rate: float) -> float:
        """Probability with which a row of this success rate is used."""
        return next(band.keep for band in self.bands if rate <= band.up_to)
