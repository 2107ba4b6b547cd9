"""Settings of one model that a workflow calls, and which models share an engine. Does not import torch.

Combinations with the rest of a run are checked in controller/config/validation/models.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from areal_like import limits
from areal_like.external.settings import ExternalModelOptions
from areal_like.settings import DType, Settings

MODELS_KEY = "rollout.models"


class EngineLimits(Protocol):
    """The settings of the policy's engine that are a model's defaults."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> DType | None: ...


class CalledModelSettings(Settings):
    """A model that the workflow calls as `tools.models["NAME"]` (docs/models.md)."""

    name: str
    """Name for the workflow and for its tokens in reports: lower-case letters, digits and `_`."""
    source: Literal["policy", "start"] | None = None
    """`policy`: the model that is trained, in a role of this name; `start`: the run's starting model, frozen. None: the
    model in `path`, or with `adapter` and without `path` the starting model."""
    path: str | None = None
    """Hugging Face folder of a frozen model with the policy's tokenizer."""
    adapter: str | None = None
    """Folder of an adapter (LoRA, in peft's format) on the frozen model. Frozen models with the same base, dtype,
    device and limits share one engine, with one copy of the base and one set of slots."""
    endpoint: ExternalModelOptions | None = None
    """A model behind an OpenAI-compatible endpoint that others run, instead of weights in each rollout worker."""
    refresh_every: int | None = Field(None, gt=0, le=limits.STEPS)
    """With `source: policy`: use a frozen copy with separate weights instead of the policy itself. It is the first
    version that a worker loads, and is replaced whenever the policy's version reaches a multiple of this number."""
    trained: bool | None = None
    """Whether its tokens are trained on. None: true for a role of the policy. Only the policy can be trained; a role
    may be declared as not trained."""
    temperature: float | None = Field(None, ge=0)
    """Default temperature of a call; 0 is greedy. None: the sample's, which trained roles need."""
    max_new_tokens: int | None = Field(None, gt=0, le=limits.TOKENS)
    """Default limit of an answer in tokens; None: the sample's."""
    num_slots: int | None = Field(None, gt=0, le=limits.PROCESSES)
    """Number of answers at once, for a model with separate weights; None: rollout.engine.num_slots."""
    max_context: int | None = Field(None, gt=1, le=limits.TOKENS)
    """Longest prompt plus answer, for a model with separate weights; None: rollout.engine.max_context."""
    device: str | None = None
    """`cpu`, `cuda` or `cuda:N`, for a model with separate weights; None: the device of the rollout worker, which it
    then shares."""
    dtype: DType | None = None
    """Compute dtype, for a model with separate weights; None: that of the policy's engine."""

    @property
    def has_weights(self) -> bool:
        """Whether it has an engine with separate weights in each rollout worker; otherwise it is a role of the policy,
        or an external model.
        """
        return self.endpoint is None and not self.is_role

    @property
    def is_role(self) -> bool:
        """Whether it is the policy itself, in a role."""
        return self.endpoint is None and self.source == "policy" and self.refresh_every is None

    @property
    def is_trained(self) -> bool:
        """Whether its tokens are trained on."""
        return self.is_role if self.trained is None else self.trained

    @property
    def words(self) -> str:
        """A description for users."""
        if self.endpoint is not None:
            return f"{self.endpoint.model} at {self.endpoint.base_url}"
        if self.is_role:
            return f"role of the policy, {'trained' if self.is_trained else 'not trained'}"
        if self.refresh_every is not None:
            return f"copy of the policy, frozen for {self.refresh_every} versions"
        base = "starting model" if self.path is None else self.path
        return f"{base}, frozen" if self.adapter is None else f"{base} with adapter {self.adapter}, frozen"


def by_engine(
    models: Sequence[CalledModelSettings], engine: EngineLimits, dtype: DType
) -> list[list[CalledModelSettings]]:
    """The models with separate weights, in a list for each engine: a copy of the policy has one alone, frozen models
    share one if base, dtype, device and limits are the same.

    Args:
        models: as declared.
        engine: the policy's engine.
        dtype: `model.dtype`.
    """
    found: dict[Any, list[CalledModelSettings]] = {}
    for model in models:
        if not model.has_weights:
            continue
        base = None if model.path is None else Path(model.path).expanduser().resolve()
        own = (
            model.num_slots or engine.num_slots, model.max_context or engine.max_context,
            model.device or engine.device, model.dtype or engine.dtype or dtype,
        )  # fmt: skip
        key = (base, *own) if model.refresh_every is None else model.name
        found.setdefault(key, []).append(model)
    return list(found.values())
