"""Base of every settings class, and what a descriptor finds wrong with settings."""

from __future__ import annotations

from typing import NamedTuple

import pydantic
from pydantic import ConfigDict


class Settings(pydantic.BaseModel):
    """Unknown keys and numbers that are not finite are refused; values are checked when made and never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class SettingProblem(NamedTuple):
    """Settings that an implementation cannot work with. `keys`: dotted paths, the first one is named in the message."""

    keys: tuple[str, ...]
    what: str
    remedy: str = ""
