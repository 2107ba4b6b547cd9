"""What `python -m trainer.prepare` is started with. Torch-free, so that the controller can write it.

Owns: `PrepareSpec`. Refuses: preparing (prepare.py), deciding where prepared models are cached (the controller).
"""

from __future__ import annotations

from typing import Literal

import pydantic

from areal_like.config import AddBos, ModelSettings, StartSpec
from trainer.config import SftSettings


class PrepareSpec(StartSpec):
    """All that one preparation needs; `seed` draws a made model's weights and the order of the supervised rows."""

    name: str = "prepare"
    model: ModelSettings
    """The model to load or to make."""
    out_dir: str
    """Where the prepared Hugging Face folder goes; it appears there whole or not at all."""
    sft_rows: str | None = None
    """JSONL file of {prompt, response} rows; None: no supervised steps."""
    sft: SftSettings | None = None
    """How to run the supervised steps; needed when sft_rows is given."""
    status_path: str | None = None
    """JSONL file for rows of progress (trainer/prepare_progress.py)."""
    publish_to: str | None = None
    """Root of a weight store in which the prepared model is published as version 0 (evaluation has no trainer)."""
    publish_kind: Literal["shm", "disk"] = "disk"
    """Kind of that store."""
    lineage: str = "l0"
    """Lineage of that version."""
    prompt_template: str | None = None
    """As `rollout.prompt_template`: the supervised prompt must look as the rollout prompt does."""
    add_bos: AddBos = "auto"
    """As `rollout.add_bos`."""

    @pydantic.model_validator(mode="after")
    def _sft_is_whole(self) -> PrepareSpec:
        if (self.sft_rows is None) != (self.sft is None):
            raise ValueError("sft_rows and sft come together: the rows, and how to train on them")
        return self
