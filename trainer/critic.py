"""The critic in training: values at the start of a step, the value loss alongside the policy's loss, and its updates.

Its targets are computed in objectives/advantages/, the order of policy and critic is in step.py, and the distribution
of its model over ranks in backends/.

The loss of an update is U / T times the sum over its tokens, for U updates and T sampled tokens of the step: all tokens
have equal weight, and how the step is split changes nothing.

Shapes: N sampled tokens of a micro-batch, S sequences of it, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.backends.port import Backend
from trainer.config import CriticSettings
from trainer.data.batch import MicroBatch, PreparedBatch
from trainer.objectives.value_loss import value_loss
from trainer.optimizer import UpdateResult
from trainer.ranks import Ranks


class Critic:
    """A backend that returns values, and its training: `begin` a step, then `backward` and `update`."""

    _num_updates: int
    """Number of updates of one pass over the batch."""
    _num_tokens: int
    _coefficient: float
    _sums: torch.Tensor
    """Sum of the losses and number of clipped tokens, float64 [2]."""
    _updates: list[UpdateResult]

    def __init__(self, backend: Backend, settings: CriticSettings, ranks: Ranks) -> None:
        self.backend, self.settings = backend, settings
        self._ranks = ranks

    def is_alone(self, step: int) -> bool:
        """True while only the critic is trained."""
        return step <= self.settings.warmup_steps

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute values before each sampled token [N], and after the last token of each sequence [S]. Collective."""
        packed = micro_batch.packed
        values_T = self._values(micro_batch)
        ends_S = torch.tensor(packed.lengths, device=values_T.device).cumsum(0) - 1
        return values_T[packed.sources_N], values_T[ends_S]

    def begin(self, prepared: PreparedBatch) -> None:
        """Start a step."""
        self._num_updates = len(prepared.mini_batches)
        self._num_tokens = sum(prepared.rewards.lengths_B)
        self._coefficient = self._num_updates / self._num_tokens
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        self._updates = []

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self.backend.zero_grad()

    def backward(self, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """Add the gradient of a micro-batch; is_last: an update comes next. Collective."""
        inputs = micro_batch.inputs
        assert inputs.values_N is not None
        assert inputs.target_N is not None
        coefficient = 0.0 if micro_batch.is_dummy else self._coefficient
        with torch.enable_grad():
            values_N = self._values(micro_batch)[micro_batch.packed.sources_N]
            losses_N, is_clipped_N = value_loss(
                values_N, inputs.values_N, inputs.target_N, clip=self.settings.value_clip
            )
            loss = coefficient * losses_N.sum()
        self.backend.backward(loss, is_last=is_last)
        if micro_batch.is_counted:
            self._sums += torch.stack([loss.detach().double(), is_clipped_N.sum(dtype=torch.float64)])

    def update(self, step: int) -> None:
        """Apply the gradient. Collective."""
        self._updates.append(self.backend.update(step))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, the same on each rank. Collective."""
        loss, num_clipped = self._ranks.sum(self._sums).tolist()
        return {
            "value_loss": loss / len(self._updates),
            "value_clip_fraction": num_clipped * self._num_updates / (self._num_tokens * len(self._updates)),
            **{f"critic_{name}": value for name, value in update_metrics(self._updates).items()},
        }

    def _values(self, micro_batch: MicroBatch) -> torch.Tensor:
        values_T, _ = self.backend.logprobs(micro_batch.packed, with_entropy=False)
        return values_T


def update_metrics(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Compute metrics of updates. Norms are means and maxima over the applied ones; 0 if there were none."""
    norms = [update.grad_norm for update in updates if update.is_applied]
    return {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "grad_norm_max": max(norms, default=0.0),
        "lr": updates[-1].lr if updates else 0.0,
        "updates": float(len(norms)),
        "skipped_updates": float(len(updates) - len(norms)),
    }
