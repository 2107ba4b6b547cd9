"""What every way to spread the trained policy over processes gives to the training step.

Owns: the port `Backend`, and the facts all backends are made with. Refuses: losses, batches, files.

Every method but `own_weights`, `own_gradients` and `parts` is collective: all ranks call it, in the same order. Names
of parameters are Hugging Face's; of tied parameters only the first is there.

Shapes: N predictions and T tokens of one packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from trainer.config import TrainerSettings
from trainer.host_copy import Part
from trainer.model.attention import AttentionChoice
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult
from trainer.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments, as torch names them."""
ReadMoments = Callable[[str], dict[str, torch.Tensor]]
"""AdamW's state of one parameter by its name, read when it is needed: the moments in the parameter's full shape, `step`
a scalar; float32."""


@dataclass(frozen=True)
class Setup:
    """What a backend is made with. num_steps: of the run, for the learning rate's schedule. max_context: longest
    sequence in tokens; None: whatever the model's positions cover. is_critic: the model's head gives one number."""

    settings: TrainerSettings
    temperature: float
    num_steps: int
    attention: AttentionChoice
    ranks: Ranks
    max_context: int | None = None
    is_critic: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type the passes compute in."""
        return torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32

    def for_critic(self) -> Setup:
        """What the critic's backend is made with: the same, with an optimizer of its own."""
        assert self.settings.critic is not None
        settings = self.settings.model_copy(update={"optimizer": self.settings.critic.optimizer})
        return replace(self, settings=settings, is_critic=True)


class Backend(Protocol):
    """The policy in training, or the critic, whole or in parts."""

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model; its parameters may be parts of the full ones."""

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [N] and entropies [N] of a micro-batch under the policy (trainer.model.logprobs).

        Of a critic: the value after each of the T packed tokens (trainer.model.values), and None.
        """

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient of this rank's part of the loss; is_last: an update comes next.

        The gradient of an update is the sum over all ranks and micro-batches: denominators are in the loss already.
        """

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        """Clip the global gradient by its norm and apply it at the rate of `step` times `lr_factor`; skip it where it
        is not finite."""

    def move(self, device: torch.device) -> int:
        """Put all that stays between steps there: parameters and AdamW's state, without gradients; the bytes moved.

        Values do not change. A backend that keeps all of it in host memory already moves nothing.
        """

    def full_weights(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        """Full parameters and persistent buffers by name, float32; empty on other ranks than 0.

        is_wanted: of these names alone; asked of backends that train adapters.
        """

    def own_weights(self) -> dict[str, torch.Tensor]:
        """What this rank has of the trained weights by name, sharing memory with them: what is written there is what
        the next pass computes with. Not collective. Asked of backends that recall versions."""

    def own_gradients(self) -> dict[str, torch.Tensor]:
        """What this rank has of the gradient that `backward` added up since the last update, by name; of one rank with
        the group's others together each item once. Not collective. Asked of backends that give gradients."""

    def parts(self) -> list[Part]:
        """What this rank has of weights (float32) and AdamW's state, without a word to the others.

        Of each tensor every item is a part of exactly one rank. Before the first update AdamW has no state. The parts
        share memory with what is trained: copy them before the next update.
        """

    def load_moments(self, read: ReadMoments) -> None:
        """Continue from a state that `parts` of any backend gave; the weights are those the model came with."""
