"""OfflineConfig: all settings of a run from files, for `areal-like sft`, `dpo` and `reward-model`, with their
cross-checks.

Files are read in offline_loading.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from areal_like import limits
from areal_like.config import ModelSettings, number_as_text
from areal_like.device_names import AUTO
from areal_like.prompts import PLACEHOLDER
from areal_like.settings import Settings
from controller.config import machine_gpus
from controller.config.backends import find_backend, ranks_fault
from controller.config.problems import Problem
from controller.config.run_config import SinkSettings
from controller.config.validation.lora import no_target_problems
from controller.config.validation.run import model_problems
from trainer.offline.config import DpoSettings, OfflineDataSettings, OfflineEvalSettings, OfflineTrainerSettings
from trainer.offline.config import Objective as Objective


class OfflineConfig(Settings):
    """One run from files."""

    name: str = Field("offline", min_length=1)
    """Name of the run folder in runs_dir; -2, -3, ... is appended if it is taken."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of all random numbers: initial weights of a model created from model.init, order of the rows."""
    runs_dir: str = "runs"
    """Folder that contains the run folders."""
    model: ModelSettings = ModelSettings()
    """The starting model."""
    data: OfflineDataSettings
    """Rows."""
    epochs: int = Field(1, gt=0, le=limits.STEPS)
    """Passes over the rows, each in a different order."""
    max_steps: int | None = Field(None, gt=0, le=limits.STEPS)
    """Stop after this many steps, also in the middle of an epoch; null: after the last epoch."""
    batch_size: int = Field(32, gt=0, le=limits.GROUPS)
    """Rows of a step, which is one update of the optimizer; the last step of an epoch may have fewer."""
    dpo: DpoSettings = DpoSettings()
    """For `areal-like dpo`."""
    trainer: OfflineTrainerSettings = OfflineTrainerSettings()
    """The process that trains."""
    eval: OfflineEvalSettings = OfflineEvalSettings()
    """Evaluation."""
    metrics: SinkSettings = SinkSettings()
    """Additional destinations of metrics (metrics.jsonl is always written), and the display."""

    @model_validator(mode="after")
    def _auto_becomes_a_device(self) -> Self:
        """Replace `device: auto`, so that no code that reads an OfflineConfig sees it."""
        if self.trainer.device == AUTO:
            device = "cuda" if machine_gpus.usable_gpus() >= self.trainer.ranks else "cpu"
            trainer = self.trainer.model_copy(update={"device": device})
            object.__setattr__(self, "trainer", trainer)  # immutable for everybody else
        return self

    @field_validator("name", mode="before")
    @classmethod
    def _name_may_look_like_a_number(cls, value: Any) -> Any:
        return number_as_text(value)


def offline_problems(config: OfflineConfig) -> Iterator[Problem]:
    """Contradictions between keys that are valid on their own."""
    yield from model_problems(config.model)
    if (fault := ranks_fault(find_backend(config.trainer.backend), config.trainer.ranks)) is not None:
        yield Problem(("trainer.ranks", "trainer.backend"), fault[0], "set trainer.backend to fsdp or auto")
    if config.trainer.lora is not None:
        yield from no_target_problems("trainer.lora", config.trainer.lora)
    if config.dpo.loss == "ipo" and config.dpo.label_smoothing:
        what = "this key applies only to the loss `sigmoid`"
        yield Problem(("dpo.label_smoothing", "dpo.loss"), what, "set label_smoothing: 0, or dpo.loss: sigmoid")
    if config.trainer.checkpoint.best is not None:
        what = "this key applies only to runs with rollouts"
        yield Problem(("trainer.checkpoint.best",), what, "set trainer.checkpoint.best: null")
    template = config.data.prompt_template
    if template is not None and PLACEHOLDER not in template:
        yield Problem(
            ("data.prompt_template",),
            f"the template does not contain {PLACEHOLDER}",
            f"add {PLACEHOLDER} to the template",
        )
    if config.data.eval is None and config.eval.every_steps:
        remedy = "set data.eval to a file of held-out rows, or set eval.every_steps: 0"
        yield Problem(("eval.every_steps", "data.eval"), "there is no evaluation data", remedy)
