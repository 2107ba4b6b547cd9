"""Common parts of tasks whose rows are pairs of answers: weights, sums and metrics.

Answers are scored in preferences.py and reward_task.py.

Shapes: B pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.backends.port import OfflineBackend
from trainer.offline.packing import Item
from trainer.offline.task import Sums


class PairTask:
    """Each pair has the same weight. A subclass computes the losses."""

    def weight_of(self, items: Sequence[Item]) -> float:
        return float(len(items))

    def loss(self, policy: OfflineBackend, items: Sequence[Item], weight: float) -> tuple[torch.Tensor, Sums]:
        losses_B, sums = self._losses(policy, items)
        return losses_B.sum() / weight, sums

    def figures(self, sums: Sums) -> dict[str, float]:
        return pair_figures(sums)

    def evaluate(self, policy: OfflineBackend, items: Sequence[Item]) -> Sums:
        return self._losses(policy, items)[1]

    def eval_figures(self, sums: Sums) -> dict[str, float]:
        return {**pair_figures(sums), "num_scored": sums["num_scored"]}

    def _losses(self, policy: OfflineBackend, items: Sequence[Item]) -> tuple[torch.Tensor, Sums]:
        """Return the loss of each pair, losses_B, and the sums for metrics."""
        raise NotImplementedError


def pair_sums(losses_B: torch.Tensor, margins_B: torch.Tensor) -> dict[str, float]:
    """Return sums over B pairs for metrics; margins_B: reward of the chosen answer minus that of the rejected one."""
    return {
        "nats": float(losses_B.detach().sum()),
        "margin": float(margins_B.sum()),
        "right": float((margins_B > 0).sum()) + 0.5 * float((margins_B == 0).sum()),
        "num_scored": float(len(margins_B)),
    }


def pair_figures(sums: Sums) -> dict[str, float]:
    """Compute metrics from sums of `pair_sums`."""
    names = {"loss": "nats", "accuracy": "right", "margin": "margin"}
    return {name: sums[key] / sums["num_scored"] for name, key in names.items()}
