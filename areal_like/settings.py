"""Base of every settings class."""

from __future__ import annotations

import pydantic
from pydantic import ConfigDict


class Settings(pydantic.BaseModel):
    """Unknown keys and numbers that are not finite are refused; values are checked when made and never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
