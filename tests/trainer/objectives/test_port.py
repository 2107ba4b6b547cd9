"""Sums over the sequences of a packed micro-batch, and descriptors that need no torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from trainer.objectives.port import RewardedSamples, Sequences, TurnRewards
from trainer.objectives.registry import ADVANTAGES, OBJECTIVES


def test_sums_means_and_maxima_go_by_sequence_and_carry_gradients() -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 1, 5, 2]
    ids_N = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    values_N = torch.from_numpy(rng.normal(size=11)).requires_grad_()
    parts = np.split(values_N.detach().numpy(), np.cumsum(lengths)[:-1])
    sequences = Sequences(ids_N, 4)
    assert sequences.lengths_S.tolist() == lengths
    np.testing.assert_allclose(sequences.sum(values_N).detach(), [part.sum() for part in parts])
    np.testing.assert_allclose(sequences.max(values_N).detach(), [part.max() for part in parts])
    mean_S = sequences.mean(values_N)
    np.testing.assert_allclose(mean_S.detach(), [part.mean() for part in parts])
    sequences.spread(mean_S.square()).sum().backward()
    expected = np.concatenate([np.full(len(part), 2 * part.mean()) for part in parts])  # L * 2 m * dm/dx, dm/dx = 1/L
    np.testing.assert_allclose(values_N.grad, expected)


@pytest.mark.processes
def test_registry_can_be_imported_without_torch() -> None:
    script = "import sys, trainer.objectives.registry, controller.config.loading; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.mark.parametrize("table", [OBJECTIVES, ADVANTAGES])
def test_names_are_unique_and_those_of_the_table(table: dict[str, object]) -> None:
    assert all(one.name == name for name, one in table.items())  # type: ignore[attr-defined]


# ---------------------------------------------------------------- rewards by token, by turn and by trajectory

LENGTHS = ((4,), (2, 3), (5,), (1, 1, 2))
"""Sampled tokens of each trajectory of four samples."""
ENDS = (None, (1, 2, 4, 5), (2, 5), None)
"""Of turns with rewards, in the sample's tokens; a turn never crosses trajectories."""


def rewarded(*, has_penalties: bool, has_turns: bool = True) -> tuple[RewardedSamples, list[np.ndarray], list[float]]:
    """The samples, their penalties by token, and the rewards before these are taken off."""
    rng = np.random.default_rng(3)
    lengths_B = np.array([sum(lengths) for lengths in LENGTHS])
    raw = rng.normal(size=4)
    penalties = [rng.normal(size=length) * has_penalties for length in lengths_B]
    turns = [
        TurnRewards(np.array(ends, np.int32), rng.normal(size=len(ends))) if ends and has_turns else None
        for ends in ENDS
    ]
    samples = RewardedSamples(
        rewards_B=np.array([reward - part.sum() for reward, part in zip(raw, penalties, strict=True)]),
        group_ids_B=np.array([7, 2, 7, 2]), lengths_B=lengths_B,
        penalties_N=np.concatenate(penalties) if has_penalties else None, turns_B=turns if has_turns else (),
        trajectory_lengths_B=LENGTHS,
    )  # fmt: skip
    return samples, penalties, raw.tolist()


def by_hand(turns: TurnRewards | None, reward: float, penalties: np.ndarray) -> np.ndarray:
    """Rewards of the tokens of one sequence."""
    found = -penalties
    places = {len(penalties): reward} if turns is None else dict(zip(turns.ends_K, turns.rewards_K, strict=True))
    for end, value in places.items():
        found[end - 1] += value
    return found


@pytest.mark.parametrize("has_penalties", [False, True])
@pytest.mark.parametrize("has_turns", [False, True])
def test_a_token_has_its_turns_reward_at_the_end_or_the_answers_minus_its_own_penalty(
    has_penalties: bool, has_turns: bool
) -> None:
    samples, penalties, raw = rewarded(has_penalties=has_penalties, has_turns=has_turns)
    turns = samples.turns_B or [None] * 4
    expected = [by_hand(*of) for of in zip(turns, raw, penalties, strict=True)]
    np.testing.assert_allclose(samples.token_rewards_N(), np.concatenate(expected), atol=1e-12)
    for number, of_turns in enumerate(turns):
        lengths_K, rewards_K = samples.turns_of(number)
        bounds = [len(penalties[number])] if of_turns is None else of_turns.ends_K
        assert lengths_K.tolist() == np.diff([0, *bounds]).tolist()
        parts = np.split(expected[number], bounds[:-1])
        np.testing.assert_allclose(rewards_K, [part.sum() for part in parts], atol=1e-12)


@pytest.mark.parametrize("has_penalties", [False, True])
@pytest.mark.parametrize("has_turns", [False, True])
def test_a_trajectory_has_the_samples_reward_its_own_penalties_and_its_own_turns(
    has_penalties: bool, has_turns: bool
) -> None:
    samples, penalties, raw = rewarded(has_penalties=has_penalties, has_turns=has_turns)
    apart = samples.by_trajectory()
    flat = [(number, length) for number, lengths in enumerate(LENGTHS) for length in lengths]
    own = [
        part for number, lengths in enumerate(LENGTHS) for part in np.split(penalties[number], np.cumsum(lengths)[:-1])
    ]
    assert apart.lengths_B.tolist() == [length for _, length in flat]
    assert apart.group_ids_B.tolist() == [[7, 2, 7, 2][number] for number, _ in flat]
    assert apart.trajectory_lengths_B == ()
    expected = [raw[number] - part.sum() for (number, _), part in zip(flat, own, strict=True)]
    np.testing.assert_allclose(apart.rewards_B, expected, atol=1e-12)
    if has_turns:
        ends = [None if one is None else one.ends_K.tolist() for one in apart.turns_B]
        assert ends == [None, [1, 2], [2, 3], [2, 5], None, None, None]
    else:
        assert len(apart.turns_B) == 0
    turns = apart.turns_B or [None] * len(flat)
    tokens = [by_hand(one, raw[number], part) for one, (number, _), part in zip(turns, flat, own, strict=True)]
    np.testing.assert_allclose(apart.token_rewards_N(), np.concatenate(tokens), atol=1e-12)


def test_samples_of_one_trajectory_each_are_what_they_are_and_groups_go_by_id() -> None:
    samples, _, _ = rewarded(has_penalties=True)
    single = RewardedSamples(samples.rewards_B, samples.group_ids_B, samples.lengths_B)
    assert single.by_trajectory() is single
    assert [members.tolist() for members in samples.groups()] == [[1, 3], [0, 2]]
