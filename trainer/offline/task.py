"""The interface of an objective, which the loop uses for supervised training, preferences and reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainer.backends.port import OfflineBackend
from trainer.offline.packing import Item

Sums = Mapping[str, float]
"""Sums over rows or tokens, which add up over micro-batches."""


class Task(Protocol):
    """One objective."""

    needs_start: bool
    """`refer_to` must be called before the first loss."""

    def refer_to(self, policy: OfflineBackend, items: Sequence[Item]) -> None:
        """Keep the outputs for these rows of the starting model, which `policy` is at this time."""

    def weight_of(self, items: Sequence[Item]) -> float:
        """Return the divisor of the loss of a batch of these rows."""

    def loss(self, policy: OfflineBackend, items: Sequence[Item], weight: float) -> tuple[torch.Tensor, Sums]:
        """Return the part of a micro-batch in the batch's loss, a scalar with gradient, and its sums."""

    def figures(self, sums: Sums) -> dict[str, float]:
        """Compute metrics of a step from the sums of its micro-batches."""

    def evaluate(self, policy: OfflineBackend, items: Sequence[Item]) -> Sums:
        """Return sums of a micro-batch of held-out rows; no gradient is recorded. `num_scored` counts the rows."""

    def eval_figures(self, sums: Sums) -> dict[str, float]:
        """Compute metrics of an evaluation, which include `accuracy` and `loss`."""
