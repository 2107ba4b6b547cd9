"""Supervised training: trains on the completion's tokens, including their end-of-sequence token.

Rows are read in rows.py.

Metrics of an evaluation: the mean negative log-prob of a trained token, and the exact match: the share of rows in which
every trained token is the most likely one. For a row of prompt and completion this means that greedy decoding produces
the completion and then ends; in a conversation each turn is evaluated after the preceding turns of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.backends.port import OfflineBackend, Setup
from trainer.offline.objectives import supervised_loss
from trainer.offline.packing import Item, packed
from trainer.offline.rows import Demonstration
from trainer.offline.task import Sums
from trainer.sft import ExampleEncoder


class SupervisedTask:
    """See trainer.offline.task.Task."""

    needs_start = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def refer_to(self, policy: OfflineBackend, items: Sequence[Item]) -> None:
        """Does nothing: no reference is needed."""

    def weight_of(self, items: Sequence[Item]) -> float:
        return float(sum(item.num_targets for item in items))

    def loss(self, policy: OfflineBackend, items: Sequence[Item], weight: float) -> tuple[torch.Tensor, Sums]:
        logprobs_N, _ = policy.logprobs(packed(items).to(self._setup.ranks.device), with_entropy=False)
        loss = supervised_loss(logprobs_N, weight)
        return loss, {"nats": float(-logprobs_N.detach().sum()), "targets": float(len(logprobs_N))}

    def figures(self, sums: Sums) -> dict[str, float]:
        return {"loss": sums["nats"] / sums["targets"], "num_targets": sums["targets"]}

    def evaluate(self, policy: OfflineBackend, items: Sequence[Item]) -> Sums:
        batch = packed(items).to(self._setup.ranks.device)
        logprobs_N, is_greedy_N = policy.greedy(batch)
        num_wrong_S = torch.zeros(len(batch.lengths), dtype=torch.int64, device=logprobs_N.device)
        num_wrong_S.index_add_(0, batch.sequence_N, (~is_greedy_N).to(torch.int64))
        return {
            "nats": float(-logprobs_N.sum()),
            "targets": float(len(logprobs_N)),
            "exact": float((num_wrong_S == 0).sum()),
            "num_scored": float(len(items)),
        }

    def eval_figures(self, sums: Sums) -> dict[str, float]:
        return {
            "accuracy": sums["exact"] / sums["num_scored"],
            "loss": sums["nats"] / sums["targets"],
            "num_scored": sums["num_scored"],
        }


def demonstration_item(encoder: ExampleEncoder, row: Demonstration) -> Item:
    """Encode a row as one sequence. Raises UserError, SequenceTooLong."""
    example = encoder.encode(row.fields, where=row.where, num_given=row.num_given)
    return Item(row.where, (example.tokens_T,), (example.loss_mask_T,))
