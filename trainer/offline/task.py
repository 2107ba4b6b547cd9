"""The port of an objective: what the loop asks of supervised training, preferences and reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainer.backends.port import Backend
from trainer.offline.packing import Item

Sums = Mapping[str, float]
"""Sums over rows or tokens, which add up over micro-batches."""


class Task(Protocol):
    """One objective."""

    needs_start: bool
    """`refer_to` must be called before the first loss."""

    def refer_to(self, policy: Backend, items: Sequence[Item]) -> None:
        """Remember what the starting model, which `policy` is at this moment, says of these rows."""

    def weight_of(self, items: Sequence[Item]) -> float:
        """What the loss of a batch of these rows is divided by."""

    def loss(self, policy: Backend, items: Sequence[Item], weight: float) -> tuple[torch.Tensor, Sums]:
        """The part that a micro-batch has in the batch's loss, a scalar with gradient, and its sums."""

    def figures(self, sums: Sums) -> dict[str, float]:
        """Metrics of a step out of the sums of its micro-batches."""

    def evaluate(self, policy: Backend, items: Sequence[Item]) -> Sums:
        """Sums of a micro-batch of held-out rows; no gradient is recorded. `num_scored` counts the rows."""

    def eval_figures(self, sums: Sums) -> dict[str, float]:
        """Metrics of an evaluation, with `accuracy` and `loss` among them."""
