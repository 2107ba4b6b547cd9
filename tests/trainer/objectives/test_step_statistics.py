"""Statistics of a step are those of all its tokens, on whatever ranks and in whatever micro-batches they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trainer.config import CorrectionSettings, LossSettings, WeightClip
from trainer.objectives.port import TokenInputs
from trainer.objectives.registry import loss_of
from trainer.objectives.step_statistics import step_statistics

SETTINGS = LossSettings(
    kind="bapo",
    options={"target_share": 0.55},
    proximal="behaviour",
    weight=WeightClip(mode="off"),
    corrections=(CorrectionSettings(kind="m2po"),),
)


def _parts(num: int) -> list[TokenInputs]:
    """120 tokens in `num` micro-batches."""
    rng = np.random.default_rng(0)
    columns = np.stack([-rng.exponential(1.0, 120), rng.normal(-0.1, 1, 120), rng.normal(0, 0.5, 120)])
    return [
        TokenInputs(b, a, 0 * b, 0 * b, b + d)
        for b, a, d in (torch.from_numpy(part) for part in np.array_split(columns, num, axis=1))
    ]


class Meeting:
    """Sums numbers of several threads, each of which stands for a rank."""

    def __init__(self, size: int) -> None:
        self._given: list[Sequence[float]] = [()] * size
        self._barrier = threading.Barrier(size, timeout=60.0)

    def sum_of(self, rank: int) -> Any:
        def sum_over_ranks(values: Sequence[float]) -> list[float]:
            self._given[rank] = values
            self._barrier.wait()
            total = [sum(column) for column in zip(*self._given, strict=True)]
            self._barrier.wait()
            return total

        return sum_over_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_finds_the_statistics_of_all_tokens(size: int) -> None:
    chosen = loss_of(SETTINGS)
    whole = step_statistics(chosen, _parts(1), list)
    assert 0.6 < whole["bapo"]["low"] <= 0.9
    assert 0 < whole["m2po"]["largest"] < 1
    parts, meeting = _parts(7), Meeting(size)
    own = [parts[rank::size] for rank in range(size - 1)] + [[]]  # the last rank has nothing of its own
    own[0] = own[0] + parts[size - 1 :: size]
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        found[rank] = step_statistics(chosen, own[rank], meeting.sum_of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[rank] for rank in range(size)] == [whole] * size


def test_loss_without_statistics_asks_for_none() -> None:
    assert step_statistics(loss_of(LossSettings()), _parts(2), list) == {}
