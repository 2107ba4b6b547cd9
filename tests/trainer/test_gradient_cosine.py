"""The cosine is that of the gradients of two consecutive updates, of all ranks, when it is due."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer.gradient_cosine import GradientCosine
from trainer.ranks import Ranks
from trainer.staleness_config import GradientCosineSettings


class Policy:
    """Its gradient is what the test sets."""

    def __init__(self) -> None:
        self.gradient: dict[str, list[float]] = {}

    def own_gradients(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(values) for name, values in self.gradient.items()}


def cosine_of(a: list[float], b: list[float]) -> float:
    x, y = np.asarray(a), np.asarray(b)
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def meter(policy: Policy, every_steps: int, ranks: Ranks | None = None) -> GradientCosine:
    made: Any = policy
    return GradientCosine(GradientCosineSettings(every_steps=every_steps), made, ranks or Ranks.alone())


def step(policy: Policy, cosine: GradientCosine, number: int, *updates: list[float]) -> dict[str, float]:
    cosine.begin(number)
    for place, values in enumerate(updates):
        policy.gradient = {"a": values[:1], "b": values[1:]}
        cosine.look(is_last=place == len(updates) - 1)
    return cosine.metrics()


def test_the_first_update_is_compared_with_the_last_of_the_step_before() -> None:
    policy = Policy()
    cosine = meter(policy, 1)
    assert step(policy, cosine, 1, [9.0, 9.0, 9.0], [1.0, 2.0, -1.0]) == {}
    found = step(policy, cosine, 2, [0.5, 0.5, 3.0], [7.0, 0.0, 0.0])
    assert found["gradient_cosine"] == pytest.approx(cosine_of([1.0, 2.0, -1.0], [0.5, 0.5, 3.0]), rel=1e-6)
    found = step(policy, cosine, 3, [7.0, 0.0, 0.0])
    assert found["gradient_cosine"] == pytest.approx(1.0)


def test_it_is_measured_every_few_steps_and_keeps_a_copy_only_until_then() -> None:
    policy = Policy()
    cosine = meter(policy, 3)
    measured, kept = [], []
    for number in range(1, 10):
        measured.append(bool(step(policy, cosine, number, [1.0, float(number), 0.5])))
        kept.append(cosine._kept is not None)
    assert measured == [False, False, True, False, False, True, False, False, True]
    assert kept == [False, True, False, False, True, False, False, True, False]


def test_after_a_gap_nothing_is_compared() -> None:
    policy = Policy()
    cosine = meter(policy, 1)
    step(policy, cosine, 1, [1.0, 1.0, 1.0])
    assert step(policy, cosine, 5, [1.0, 1.0, 1.0]) == {}


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [float("nan"), 1.0, 1.0], [float("inf"), 1.0, 1.0]])
def test_a_gradient_without_direction_gives_no_number(values: list[float]) -> None:
    policy = Policy()
    cosine = meter(policy, 1)
    step(policy, cosine, 1, [1.0, 1.0, 1.0])
    assert step(policy, cosine, 2, values) == {}


def test_parameters_without_a_gradient_on_one_side_count_in_its_norm_alone() -> None:
    policy = Policy()
    cosine = meter(policy, 1)
    for number, gradient in ((1, {"a": [1.0], "b": [2.0]}), (2, {"b": [1.0], "c": [3.0]})):
        cosine.begin(number)
        policy.gradient = gradient
        cosine.look(is_last=True)
    assert cosine.metrics()["gradient_cosine"] == pytest.approx(2.0 / np.sqrt(5 * 10))


def test_parts_of_two_ranks_add_up() -> None:
    whole = ([1.0, 2.0, -1.0, 4.0], [0.5, 0.5, 3.0, 1.0])
    sums = [np.array([a @ b, b @ b, a @ a]) for a, b in ((np.array(w[2:]), np.array(v[2:])) for w, v in [whole])]
    ranks = Ranks.alone()
    ranks.sum = lambda values: values + torch.from_numpy(sums[0])  # type: ignore[method-assign]
    policy = Policy()
    cosine = meter(policy, 1, ranks)
    step(policy, cosine, 1, whole[0][:2])
    assert step(policy, cosine, 2, whole[1][:2])["gradient_cosine"] == pytest.approx(cosine_of(*whole), rel=1e-6)
