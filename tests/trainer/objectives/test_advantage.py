"""Advantages go by group id, whatever the order and size of groups."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import AdvantageSettings
from trainer.objectives.advantage import advantages as all_advantages
from trainer.objectives.advantage import shaped_rewards
from trainer.objectives.registry import ADVANTAGES


def advantages(rewards: np.ndarray, group_ids: np.ndarray, config: AdvantageSettings) -> np.ndarray:
    """Of answers of two tokens each: one advantage per sample."""
    return all_advantages(rewards, group_ids, [2] * len(rewards), config)


KINDS = ["grpo", "grpo_no_std", "rloo"]


def _oracle(rewards: list[float], kind: str, eps: float) -> list[float]:
    mean = sum(rewards) / len(rewards)
    if kind == "grpo":
        std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        return [(r - mean) / (std + eps) for r in rewards]
    if kind == "grpo_no_std":
        return [r - mean for r in rewards]
    if len(rewards) == 1:
        return [0.0]
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


@settings(max_examples=num_examples(150), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    pairs=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=30),
)
def test_groups_of_unequal_size_in_any_order_match_the_oracle(kind: str, pairs: list[tuple[int, float]]) -> None:
    config = AdvantageSettings(kind=kind)
    group_ids, rewards = zip(*pairs, strict=True)
    ours = advantages(np.asarray(rewards), np.asarray(group_ids), config)
    for group_id in set(group_ids):
        members = [i for i, g in enumerate(group_ids) if g == group_id]
        expected = _oracle([rewards[i] for i in members], kind, config.std_eps)
        np.testing.assert_allclose(ours[members], expected, rtol=1e-6, atol=1e-7)


def test_a_dropped_sample_does_not_shift_its_neighbours_groups() -> None:
    group_ids = np.asarray([0, 0, 0, 1, 1, 1, 1])  # group 0 lost its fourth sample
    rewards = np.asarray([0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 9.0])
    ours = advantages(rewards, group_ids, AdvantageSettings(kind="grpo_no_std"))
    np.testing.assert_allclose(ours, [-1 / 3, -1 / 3, 2 / 3, -1, -1, -1, 3], rtol=1e-6)
    by_stride = (rewards[:4] - rewards[:4].mean()).tolist()  # what a fixed group size of 4 would make of it
    assert abs(by_stride[0] - ours[0]) > 1


@pytest.mark.parametrize(
    "kind", [name for name, one in ADVANTAGES.items() if not (one.needs_values or one.needs_starts)]
)
def test_equal_rewards_give_exactly_zero(kind: str) -> None:
    settings_ = AdvantageSettings(kind=kind)
    assert not advantages(np.full(3, 0.1), np.zeros(3, int), settings_).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_gives_exactly_zero(kind: str) -> None:
    settings_ = AdvantageSettings(kind=kind)
    ours = advantages(np.asarray([7.0, 0.0, 1.0]), np.asarray([4, 9, 9]), settings_)
    assert ours[0] == 0
    assert ours[1] < 0 < ours[2]


def test_global_norm_ignores_groups() -> None:
    rewards = np.asarray([1.0, 2.0, 4.0, 9.0])
    ours = advantages(rewards, np.asarray([0, 0, 1, 2]), AdvantageSettings(kind="global_norm"))
    np.testing.assert_allclose(ours, (rewards - 4) / (rewards.std() + 1e-4), rtol=1e-6)


def test_rewards_are_biased_scaled_then_clipped_before_anything_else() -> None:
    config = AdvantageSettings(kind="grpo_no_std", reward_bias=-0.5, reward_scale=10, reward_clip=4.0)
    np.testing.assert_allclose(shaped_rewards(np.asarray([0.0, 0.6, 1.0]), config), [-4.0, 1.0, 4.0])
    np.testing.assert_allclose(advantages(np.asarray([0.0, 1.0]), np.zeros(2, int), config), [-4.0, 4.0])


# ---------------------------------------------------------------- over the batch and over tokens

REWARDS = [0.0, 1.0, 1.0, 0.5, 0.25, 0.0, 3.0]
GROUPS = [0, 0, 0, 1, 1, 2, 2]
LENGTHS = [3, 1, 4, 2, 6, 1, 2]
PENALTIES = [0.01 * i for i in range(sum(LENGTHS))]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _standard_scores(values: list[float], eps: float) -> list[float]:
    mean = _mean(values)
    std = _mean([(value - mean) ** 2 for value in values]) ** 0.5
    return [(value - mean) / (std + eps) for value in values]


def _returns(rewards: list[float], *, is_penalised: bool) -> list[float]:
    found, first = [], 0
    for reward, length in zip(rewards, LENGTHS, strict=True):
        of_answer = PENALTIES[first : first + length] if is_penalised else [0.0] * length
        found += [reward - sum(of_answer[t:]) for t in range(length)]
        first += length
    return found


def _centred(rewards: list[float]) -> list[float]:
    of = {g: [r for r, h in zip(rewards, GROUPS, strict=True) if h == g] for g in GROUPS}
    return [r - _mean(of[g]) for r, g in zip(rewards, GROUPS, strict=True)]


def test_lite_ppo_divides_by_the_deviation_of_the_batch() -> None:
    config = AdvantageSettings(kind="lite_ppo", std_eps=0.01)
    mean = _mean(REWARDS)
    std = _mean([(r - mean) ** 2 for r in REWARDS]) ** 0.5
    expected = [r / (std + 0.01) for r in _centred(REWARDS)]
    found = all_advantages(np.asarray(REWARDS), np.asarray(GROUPS), LENGTHS, config)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("is_penalised", [False, True])
def test_reinforce_pp_normalises_returns_over_tokens(is_penalised: bool) -> None:
    config = AdvantageSettings(kind="reinforce_pp", std_eps=0.01)
    penalties = np.asarray(PENALTIES) if is_penalised else None
    found = all_advantages(np.asarray(REWARDS), np.asarray(GROUPS), LENGTHS, config, penalties)
    expected = _standard_scores(_returns(REWARDS, is_penalised=is_penalised), 0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_off_first() -> None:
    config = AdvantageSettings(kind="reinforce_pp_baseline", std_eps=0.01)
    found = all_advantages(np.asarray(REWARDS), np.asarray(GROUPS), LENGTHS, config)
    expected = _standard_scores(_returns(_centred(REWARDS), is_penalised=False), 0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo", "global_norm", "lite_ppo"])
def test_penalties_of_all_tokens_are_taken_off_the_reward_of_an_answer(kind: str) -> None:
    config = AdvantageSettings(kind=kind)
    totals = [sum(part) for part in np.split(np.asarray(PENALTIES), np.cumsum(LENGTHS)[:-1])]
    found = all_advantages(np.asarray(REWARDS), np.asarray(GROUPS), LENGTHS, config, np.asarray(PENALTIES))
    expected = all_advantages(np.asarray(REWARDS) - totals, np.asarray(GROUPS), LENGTHS, config)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
