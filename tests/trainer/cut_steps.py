"""The loss of a step and its gradient in float64, however its sequences are cut into micro-batches and dealt to ranks.

Ranks are threads that add numbers over each other, as the statistics of a step do over processes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import torch

from trainer.config import LossSettings
from trainer.objectives.loss import policy_loss
from trainer.objectives.port import Sequences, SumOverRanks, TokenInputs
from trainer.objectives.registry import loss_of
from trainer.objectives.step_statistics import step_statistics

Cut = Sequence[Sequence[Sequence[int]]]
"""For each rank its micro-batches, each of them sequences by number."""
WHOLE: Cut = [[(0, 1, 2, 3, 4)]]
CUTS: dict[str, Cut] = {
    "one by one": [[(0,), (1,), (2,), (3,), (4,)]],
    "two ranks": [[(0, 3), (2,)], [(1, 4)]],
    "three ranks, one without a sequence": [[(4,), (0, 1)], [], [(3, 2)]],
}
"""Ways to cut a step of five sequences."""


class RankSums:
    """Sums over ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60.0)
        self._own: list[Sequence[float]] = [()] * num_ranks

    def of(self, rank: int) -> SumOverRanks:
        """The sum as this rank calls it."""

        def add(values: Sequence[float]) -> list[float]:
            self._own[rank] = values
            self._barrier.wait()
            total = [math.fsum(column) for column in zip(*self._own, strict=True)]
            self._barrier.wait()
            return total

        return add


def part_of(inputs: TokenInputs, members_N: torch.Tensor, lengths: Sequence[int]) -> TokenInputs:
    """These tokens of the inputs, of sequences with these lengths."""
    chosen = {
        one.name: value[members_N]
        for one in fields(inputs)
        if isinstance(value := getattr(inputs, one.name), torch.Tensor)
    }
    ids_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return replace(inputs, **chosen, sequences=Sequences(ids_N, len(lengths)))


def loss_and_gradient(
    current: np.ndarray, inputs: TokenInputs, lengths: Sequence[int], settings: LossSettings, cut: Cut
) -> tuple[float, np.ndarray]:
    """Of the whole step, summed over the micro-batches of all ranks."""
    current_N = torch.from_numpy(current.copy()).requires_grad_()
    places = torch.arange(len(current)).split(list(lengths))
    sums, chosen = RankSums(len(cut)), loss_of(settings)

    def losses_of(rank: int) -> list[torch.Tensor]:
        members = [torch.cat([places[one] for one in micro_batch]) for micro_batch in cut[rank]]
        parts = [
            part_of(inputs, members_N, [lengths[one] for one in micro_batch])
            for members_N, micro_batch in zip(members, cut[rank], strict=True)
        ]
        statistics = step_statistics(chosen, parts, sums.of(rank))
        return [
            policy_loss(current_N[members_N], torch.zeros(len(members_N)), replace(part, step=statistics), settings)[0]
            for members_N, part in zip(members, parts, strict=True)
        ]

    with ThreadPoolExecutor(len(cut)) as pool:
        losses = [loss for found in pool.map(losses_of, range(len(cut))) for loss in found]
    loss = torch.stack(losses).sum()
    loss.backward()
    assert current_N.grad is not None
    return loss.item(), current_N.grad.numpy()
