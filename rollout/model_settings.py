"""Settings of one model that a workflow calls. Torch-free.

Owns: `CalledModelSettings`, what follows from them (has it weights of its own, is it trained). Refuses: combinations
with the rest of a run (controller/config/validation/models.py).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like import limits
from areal_like.settings import DType, Settings

MODELS_KEY = "rollout.models"


class CalledModelSettings(Settings):
    """A model that the workflow calls as `tools.models["NAME"]` (docs/models.md)."""

    name: str
    """Name by which the workflow calls it, and under which its tokens are shown: small letters, digits and `_`."""
    source: Literal["policy", "start"] | None = None
    """`policy`: the model that is trained, in a role of this name; `start`: the run's starting model, frozen. None: the
    model in `path`."""
    path: str | None = None
    """Folder of a frozen model with the policy's tokenizer, in the form of Hugging Face."""
    refresh_every: int | None = Field(None, gt=0, le=limits.STEPS)
    """With `source: policy`: instead of the policy itself a frozen copy of it with weights of its own. It is the first
    version that a worker loads, and is replaced whenever the policy's version reaches a multiple of this number."""
    trained: bool | None = None
    """Its tokens are trained on. None: true for a role of the policy. Nothing but the policy can be trained; a role of
    it may be declared as not trained."""
    temperature: float | None = Field(None, ge=0)
    """Where a call names none; 0 is greedy. None: that of the sample, as is right for whatever is trained."""
    max_new_tokens: int | None = Field(None, gt=0, le=limits.TOKENS)
    """Longest answer where a call names none; None: that of the sample."""
    num_slots: int | None = Field(None, gt=0, le=limits.PROCESSES)
    """Answers at once, for a model with weights of its own; None: rollout.engine.num_slots."""
    max_context: int | None = Field(None, gt=1, le=limits.TOKENS)
    """Longest prompt plus answer, likewise; None: rollout.engine.max_context."""
    device: str | None = None
    """`cpu`, `cuda` or `cuda:N`, likewise; None: the device of the rollout worker, which it shares then."""
    dtype: DType | None = None
    """Compute dtype, likewise; None: the policy's engine's."""

    @property
    def has_weights(self) -> bool:
        """It has an engine with weights of its own in each rollout worker; otherwise it is a role of the policy."""
        return self.source != "policy" or self.refresh_every is not None

    @property
    def is_trained(self) -> bool:
        """Its tokens are trained on."""
        return not self.has_weights if self.trained is None else self.trained

    @property
    def words(self) -> str:
        """What it is, for people."""
        if not self.has_weights:
            return f"role of the policy, {'trained' if self.is_trained else 'not trained'}"
        if self.refresh_every is not None:
            return f"copy of the policy, frozen for {self.refresh_every} versions"
        return "starting model, frozen" if self.source == "start" else f"{self.path}, frozen"
