"""The off-policy optimal baseline equals its formula and has the least variance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.config import AdvantageSettings
from trainer.objectives.advantages.opob import Options, compute
from trainer.objectives.port import RewardedSamples
from trainer.objectives.registry import advantage_faults

GROUP_IDS = np.array([0, 1, 0, 0, 1, 1, 2, 0])


def samples(seed: int = 0, **changes: Any) -> RewardedSamples:
    rng = np.random.default_rng(seed)
    num = len(GROUP_IDS)
    keys: dict[str, Any] = {
        "rewards_B": rng.normal(0, 1, num), "group_ids_B": GROUP_IDS, "lengths_B": rng.integers(1, 9, num),
        "log_weights_B": rng.normal(0, 1, num), "square_norms_B": rng.exponential(2.0, num), **changes,
    }  # fmt: skip
    return RewardedSamples(**keys)


def oracle(x: RewardedSamples, squares: np.ndarray, max_weight: float = np.inf) -> np.ndarray:
    """arXiv 2602.17616: b = sum w^2 g^2 R / sum w^2 g^2, sample by sample."""
    result = np.zeros(len(x.rewards_B))
    assert x.log_weights_B is not None
    for group in np.unique(x.group_ids_B):
        above = below = 0.0
        for sample in np.flatnonzero(x.group_ids_B == group):
            share = min(float(np.exp(x.log_weights_B[sample])), max_weight) ** 2 * squares[sample]
            above, below = above + share * x.rewards_B[sample], below + share
        for sample in np.flatnonzero(x.group_ids_B == group):
            result[sample] = x.rewards_B[sample] - above / below
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_weight", [None, 1.2])
def test_advantage_equals_the_formula(seed: int, max_weight: float | None) -> None:
    x = samples(seed)
    assert x.square_norms_B is not None
    bound = np.inf if max_weight is None else max_weight
    exact = compute(x, Options(max_weight=max_weight))
    np.testing.assert_allclose(exact, oracle(x, x.square_norms_B, bound), rtol=1e-9, atol=1e-12)
    by_length = compute(x, Options(gradient_norm="length", max_weight=max_weight))
    np.testing.assert_allclose(by_length, oracle(x, x.lengths_B.astype(float), bound), rtol=1e-9, atol=1e-12)


def test_no_other_baseline_of_a_group_gives_a_smaller_second_moment() -> None:
    """The weighted gradient of a sample has the square w^2 g^2 (r - b)^2."""
    x = samples(1)
    assert x.log_weights_B is not None
    assert x.square_norms_B is not None
    members = np.flatnonzero(x.group_ids_B == 0)
    shares = np.exp(2 * x.log_weights_B[members]) * x.square_norms_B[members]
    found = compute(x, Options())[members]
    least = (shares * found**2).sum()
    for shift in (-0.1, -1e-3, 1e-3, 0.1):
        assert (shares * (found + shift) ** 2).sum() > least


def test_a_sample_that_dominates_is_compared_with_itself() -> None:
    log_weights_B = np.zeros(len(GROUP_IDS))
    log_weights_B[2] = 800.0
    x = samples(log_weights_B=log_weights_B)
    found = compute(x, Options())
    assert found[2] == pytest.approx(0.0, abs=1e-9)
    assert np.isfinite(found).all()


def test_equal_rewards_give_exactly_nothing_and_a_lone_sample_too() -> None:
    x = samples(rewards_B=np.full(len(GROUP_IDS), 0.1))
    assert (compute(x, Options()) == 0.0).all()
    assert compute(samples(), Options())[6] == 0.0


def test_samples_without_any_gradient_have_the_mean_as_their_baseline() -> None:
    x = samples(square_norms_B=np.zeros(len(GROUP_IDS)))
    found = compute(x, Options())
    for group in (0, 1):
        assert found[group == GROUP_IDS].sum() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "group_size", "words"),
    [
        ({"options": {"gradient_norm": "no"}}, 4, "gradient_norm"),
        ({"options": {"max_weight": 0}}, 4, "greater than 0"),
        ({}, 1, "its own baseline"),
        ({"std_eps": 0.5}, 4, "has no effect"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], group_size: int, words: str) -> None:
    (fault,) = advantage_faults(AdvantageSettings(kind="opob", **changes), group_size)
    assert words in fault.what or words in fault.key
