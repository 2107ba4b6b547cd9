"""The interface of backends: how the trained policy is distributed over processes, for the training step.

Every method except `own_weights`, `own_gradients` and `parts` is collective: all ranks call it, in the same order.
Names of parameters are Hugging Face's; of tied parameters only the first is included.

Shapes: N predictions and T tokens of one packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from trainer.config import TrainerSettings
from trainer.host_copy import Part
from trainer.model.attention import AttentionChoice
from trainer.model.outline import ReadMoments as ReadMoments
from trainer.model.outline import SlicedSource
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult
from trainer.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments, by torch's names."""


@dataclass(frozen=True)
class Setup:
    """The inputs of a backend. num_steps: of the run, for the learning rate's schedule. max_context: longest sequence
    in tokens; None: the number of the model's positions. is_critic: the model's head returns one number. source: of
    the model's parameters, which are then on the meta device; only given to backends that read their own part
    (`BackendDescriptor.reads_parts`)."""

    settings: TrainerSettings
    temperature: float
    num_steps: int
    attention: AttentionChoice
    ranks: Ranks
    max_context: int | None = None
    is_critic: bool = False
    source: SlicedSource | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the passes."""
        return torch.bfloat16 if self.settings.precision == "bfloat16" else torch.float32

    def for_critic(self) -> Setup:
        """Return the setup of the critic's backend: the same, with the critic's optimizer."""
        assert self.settings.critic is not None
        settings = self.settings.model_copy(update={"optimizer": self.settings.critic.optimizer})
        return replace(self, settings=settings, is_critic=True, source=None)


class Backend(Protocol):
    """The policy in training, or the critic, in full or distributed."""

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model; its parameters may be parts of the full ones."""

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute log-probs [N] and entropies [N] of a micro-batch under the policy (trainer.model.logprobs).

        For a critic: the value after each of the T packed tokens (trainer.model.values), and None.
        """

    def zero_grad(self) -> None:
        """Reset the gradients."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient of this rank's part of the loss; is_last: an update comes next.

        The gradient of an update is the sum over all ranks and micro-batches: denominators are already in the loss.
        """

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        """Clip the global gradient by its norm and apply it with the rate of `step` times `lr_factor`; skip the update
        if it is not finite."""

    def move(self, device: torch.device) -> int:
        """Move all state that is kept between steps to a device: parameters and AdamW's state, without gradients.

        Returns the number of bytes moved. Values do not change. A backend that keeps all state in host memory moves
        nothing.
        """

    def full_weights(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        """Return full parameters and persistent buffers by name, float32; empty on ranks other than 0.

        is_wanted: filter by name; only used with backends that train adapters.
        """

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the trained weights by name, sharing memory with them: the next pass computes with
        values that are written there. Not collective. Only used with backends that recall versions."""

    def own_gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the gradient that `backward` accumulated since the last update, by name; the parts
        of all ranks together have each item once. Not collective. Only used with backends that give gradients."""

    def parts(self) -> list[Part]:
        """Return this rank's part of weights (float32) and AdamW's state, without communication.

        Each item of a tensor belongs to exactly one rank's part. Before the first update AdamW has no state. The parts
        share memory with the trained parameters: copy them before the next update.
        """

    def load_moments(self, read: ReadMoments) -> None:
        """Restore a state from `parts` of any backend; the weights are those that the model was loaded with."""


@runtime_checkable
class PartsBackend(Backend, Protocol):
    """A backend that reads its own parts (`BackendDescriptor.reads_parts`)."""

    def check(self) -> float:
        """Compare packed log-probs with the model's own, by all ranks together; returns the largest difference in nats.
        Raises UserError if it is too large."""


class OfflineBackend(Backend, Protocol):
    """A backend of training from files: `torch` or `fsdp`."""

    def greedy(self, packed: PackedSequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs [N] and whether each token is the most likely one, without gradients
        (trainer.model.logprobs.greedy_logprobs).
        """


class FixedPolicy(Protocol):
    """A policy that is not trained, distributed over the ranks."""

    def logprobs(self, packed: PackedSequences) -> torch.Tensor:
        """Compute log-probs [N] of a micro-batch. Collective."""
