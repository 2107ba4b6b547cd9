"""Credit by turn, against ten lines of plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import AdvantageSettings
from trainer.objectives.advantage import advantages
from trainer.objectives.port import TurnRewards

Turns = list[tuple[int, float]]
"""Sampled tokens and reward of each turn of one sample."""


def of_turns(samples: list[Turns]) -> tuple[np.ndarray, list[int], list[TurnRewards]]:
    rewards = np.array([sum(reward for _, reward in turns) for turns in samples])
    lengths = [sum(length for length, _ in turns) for turns in samples]
    ends = [np.cumsum([length for length, _ in turns]).astype(np.int32) for turns in samples]
    return rewards, lengths, [
        TurnRewards(end, np.array([reward for _, reward in turns], np.float32))
        for end, turns in zip(ends, samples, strict=True)
    ]  # fmt: skip


def ours(
    samples: list[Turns], group_ids: list[int], penalties: np.ndarray | None = None, **options: float
) -> list[float]:
    rewards, lengths, turns = of_turns(samples)
    settings = AdvantageSettings(kind="turns", options=dict(options))
    return advantages(rewards, np.array(group_ids), lengths, settings, penalties, turns).tolist()


def oracle(samples: list[Turns], group_ids: list[int], discount: float, eps: float = 1e-4) -> list[float]:
    returns = [
        [sum(discount ** (j - k) * turns[j][1] for j in range(k, len(turns))) for k in range(len(turns))]
        for turns in samples
    ]
    difference = {}
    for group in set(group_ids):
        members = [i for i, one in enumerate(group_ids) if one == group]
        counts = sorted((len(samples[i]) for i in members), reverse=True)
        last = counts[1] - 1 if len(counts) > 1 else 0
        for i in members:
            for k, value in enumerate(returns[i]):
                others = [r for m in members for j, r in enumerate(returns[m]) if min(j, last) == min(k, last)]
                difference[i, k] = value - sum(others) / len(others)
        all_of = [difference[i, k] for i in members for k in range(len(returns[i]))]
        std = (sum(one**2 for one in all_of) / len(all_of)) ** 0.5
        for i in members:
            for k in range(len(returns[i])):
                difference[i, k] /= std + eps
    return [
        difference[i, k]
        for i, turns in enumerate(samples)
        for k, (length, _) in enumerate(turns)
        for _ in range(length)
    ]


turn = st.tuples(st.integers(1, 3), st.sampled_from([-0.5, 0.0, 0.25, 1.0]))


@given(
    samples=st.lists(st.lists(turn, min_size=1, max_size=4), min_size=2, max_size=8),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_groups_of_any_turns_match_the_oracle(samples: list[Turns], discount: float) -> None:
    group_ids = [number % 2 for number in range(len(samples))]
    expected = oracle(samples, group_ids, discount)
    np.testing.assert_allclose(ours(samples, group_ids, discount=discount), expected, rtol=1e-6, atol=1e-7)


def test_a_good_turn_is_praised_in_an_episode_that_ends_badly() -> None:
    good_then_bad, bad_then_bad = [(2, 1.0), (1, -1.0)], [(1, 0.0), (2, -1.0)]
    found = ours([good_then_bad, bad_then_bad], [0, 0], discount=0.0)
    assert found[0] == found[1] > 0.9
    assert found[2] == 0.0
    assert found[3] < -0.9
    assert found[4:] == [0.0, 0.0]


def test_equal_sums_of_rewards_still_teach_when_the_turns_differ() -> None:
    early, late = [(1, 1.0), (1, 0.0)], [(1, 0.0), (1, 1.0)]
    assert any(ours([early, late], [0, 0], discount=0.5))


def test_samples_without_turns_are_one_turn_as_in_grpo() -> None:
    rewards, group_ids = np.array([0.0, 1.0, 0.5, 2.0, 2.0]), np.array([0, 0, 0, 1, 1])
    whole = advantages(rewards, group_ids, [2] * 5, AdvantageSettings(kind="turns"))
    grpo = advantages(rewards, group_ids, [2] * 5, AdvantageSettings(kind="grpo"))
    np.testing.assert_allclose(whole, np.repeat(grpo, 2), rtol=1e-6)


def test_penalties_count_in_their_own_turn() -> None:
    samples, penalties = [[(1, 1.0), (2, 0.0)], [(2, 1.0), (1, 0.0)]], np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.25])
    expected = oracle([[(1, 0.5), (2, 0.0)], [(2, 1.0), (1, -0.25)]], [0, 0], 0.0)
    np.testing.assert_allclose(ours(samples, [0, 0], penalties, discount=0.0), expected, rtol=1e-6, atol=1e-7)


def test_rewards_by_turn_are_scaled_as_whole_ones() -> None:
    rewards, lengths, turns = of_turns([[(1, 1.0), (1, 0.5)], [(1, 0.0), (1, 0.25)]])
    settings = AdvantageSettings(kind="turns", std_eps=1.0, reward_scale=4.0)
    by_hand = AdvantageSettings(kind="turns", std_eps=1.0)
    four_times = [TurnRewards(one.ends_K, 4.0 * one.rewards_K) for one in turns]
    scaled = advantages(rewards, np.zeros(2, int), lengths, settings, turns_B=turns)
    assert scaled.tolist() == advantages(rewards, np.zeros(2, int), lengths, by_hand, turns_B=four_times).tolist()


@pytest.mark.parametrize("discount", [-0.1, 1.1])
def test_a_discount_out_of_range_is_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="discount"):
        ours([[(1, 1.0)], [(1, 0.0)]], [0, 0], discount=discount)
