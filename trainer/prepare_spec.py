"""The spec of `python -m trainer.prepare`. Imports no torch, so that the controller can write it."""

from __future__ import annotations

from typing import Literal

import pydantic

from areal_like.config import AddBos, ModelSettings, StartSpec
from trainer.config import SftSettings


class PrepareSpec(StartSpec):
    """The spec of one preparation; `seed` determines the weights of a new model and the order of supervised rows."""

    name: str = "prepare"
    model: ModelSettings
    """The model to load or to create."""
    out_dir: str
    """Path of the prepared Hugging Face folder, which is written completely or not at all."""
    sft_rows: str | None = None
    """JSONL file of {prompt, response} rows; None: no supervised steps."""
    sft: SftSettings | None = None
    """How to run the supervised steps; required with sft_rows."""
    status_path: str | None = None
    """JSONL file for rows of progress (trainer/prepare_progress.py)."""
    publish_to: str | None = None
    """Root of a weight store in which the prepared model is published as version 0 (evaluation has no trainer)."""
    publish_kind: Literal["shm", "disk"] = "disk"
    """Kind of that store."""
    lineage: str = "l0"
    """Lineage of that version."""
    prompt_template: str | None = None
    """As `rollout.prompt_template`: the supervised prompt must equal the rollout prompt."""
    add_bos: AddBos = "auto"
    """As `rollout.add_bos`."""

    @pydantic.model_validator(mode="after")
    def _sft_is_whole(self) -> PrepareSpec:
        if (self.sft_rows is None) != (self.sft is None):
            raise ValueError("sft_rows (the rows) and sft (the training settings) must be set together")
        return self
