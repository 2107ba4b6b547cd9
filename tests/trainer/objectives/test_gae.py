"""GAE and the value loss against their formulas: sums written out, finite differences, and the loop of PPO trainers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import UserError
from trainer.config import AdvantageSettings, LossSettings
from trainer.objectives.advantage import advantages_of, rewarded, targets_of
from trainer.objectives.advantages import gae
from trainer.objectives.advantages.gae import GaeOptions
from trainer.objectives.port import RewardedSamples, TurnRewards
from trainer.objectives.registry import reads_values
from trainer.objectives.value_loss import value_loss

LENGTHS = [5, 1, 7, 2, 4]
TURNS = [[2, 3], [1], [1, 1, 5], [2], [3, 1]]
"""Tokens of each turn."""


def made(seed: int = 0, *, is_penalised: bool = False) -> RewardedSamples:
    """A batch of five answers, the second and third of them cut."""
    rng = np.random.default_rng(seed)
    num, rewards = sum(LENGTHS), rng.normal(size=5)
    penalties = rng.normal(size=num) * 0.1 if is_penalised else None
    samples = rewarded(rewards, np.array([0, 0, 1, 1, 2]), LENGTHS, AdvantageSettings(kind="gae"), penalties)
    starts = [place == 0 for turns in TURNS for length in turns for place in range(length)]
    return replace(
        samples,
        values_N=rng.normal(size=num),
        end_values_Q=rng.normal(size=5),
        turn_starts_N=np.array(starts),
        is_cut_Q=np.array([False, True, True, False, False]),
    )


def oracle(samples: RewardedSamples, options: GaeOptions, raw_rewards: np.ndarray) -> tuple[list[float], list[float]]:
    """Advantages and values of steps at each token: the sum over k of (gamma lambda)^k d_(t+k), step by step."""
    assert samples.values_N is not None
    assert samples.end_values_Q is not None
    assert samples.is_cut_Q is not None
    found, values, first = [], [], 0
    penalties = np.zeros(sum(LENGTHS)) if samples.penalties_N is None else samples.penalties_N
    for number, turns in enumerate(TURNS):
        steps = turns if options.unit == "turn" else [1] * LENGTHS[number]
        starts = [first + sum(steps[:k]) for k in range(len(steps))]
        v = [float(samples.values_N[start]) for start in starts]
        r = [-float(penalties[start : start + length].sum()) for start, length in zip(starts, steps, strict=True)]
        r[-1] += float(raw_rewards[number])
        is_open = options.bootstrap_cut and bool(samples.is_cut_Q[number])
        v.append(float(samples.end_values_Q[number]) if is_open else 0.0)
        d = [r[k] + options.gamma * v[k + 1] - v[k] for k in range(len(steps))]
        for k, length in enumerate(steps):
            a = sum((options.gamma * options.gae_lambda) ** j * d[k + j] for j in range(len(steps) - k))
            found += [a] * length
            values += [v[k]] * length
        first += LENGTHS[number]
    return found, values


@pytest.mark.parametrize("is_penalised", [False, True])
@pytest.mark.parametrize("bootstrap_cut", [False, True])
@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_temporal_differences(
    gamma: float, lambda_: float, unit: Any, bootstrap_cut: bool, is_penalised: bool
) -> None:
    samples = made(is_penalised=is_penalised)
    options = GaeOptions(gamma=gamma, gae_lambda=lambda_, unit=unit, bootstrap_cut=bootstrap_cut, normalise=False)
    raw = made().rewards_B  # the same draw: rewards come first
    expected, values = oracle(samples, options, raw)
    np.testing.assert_allclose(gae.compute(samples, options), expected, atol=1e-9)
    np.testing.assert_allclose(gae.targets(samples, options), np.add(expected, values), atol=1e-9)


def test_gae_is_the_backward_loop_of_ppo_trainers() -> None:
    """As in TRL's PPO trainer: padded rewards and values, from the last token to the first."""
    samples, gamma, lam = made(is_penalised=True), 0.97, 0.9
    assert samples.values_N is not None
    ends = np.cumsum(LENGTHS)
    width = max(LENGTHS)
    rewards, values = torch.zeros(5, width, dtype=torch.float64), torch.zeros(5, width, dtype=torch.float64)
    for row, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        rewards[row, :length] = torch.from_numpy(samples.token_rewards_N()[end - length : end])
        values[row, :length] = torch.from_numpy(samples.values_N[end - length : end])
    last, reversed_ = torch.zeros(5, dtype=torch.float64), []
    for t in reversed(range(width)):
        next_values = values[:, t + 1] if t < width - 1 else 0.0
        last = rewards[:, t] + gamma * next_values - values[:, t] + gamma * lam * last
        reversed_.append(last)
    table = torch.stack(reversed_[::-1], dim=1)
    expected = np.concatenate([table[row, :length].numpy() for row, length in enumerate(LENGTHS)])
    found = gae.compute(samples, GaeOptions(gamma=gamma, gae_lambda=lam, normalise=False))
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_lambda_1_gives_the_return_minus_the_value_and_targets_that_are_the_return() -> None:
    samples = made(is_penalised=True)
    options = GaeOptions(gae_lambda=0.3, target_lambda=1.0, normalise=False)
    returns = targets_of(samples, AdvantageSettings(kind="grpo"))  # the default of every kind
    np.testing.assert_allclose(gae.targets(samples, options), returns, atol=1e-6)
    whole = gae.compute(samples, GaeOptions(gae_lambda=1.0, normalise=False))
    np.testing.assert_allclose(whole, returns - samples.values_N, atol=1e-6)


def test_normalised_advantages_are_standard_scores_over_tokens_and_targets_are_not_normalised() -> None:
    samples = made()
    raw = gae.compute(samples, GaeOptions(normalise=False))
    found = advantages_of(samples, AdvantageSettings(kind="gae", std_eps=0.01))
    np.testing.assert_allclose(found, (raw - raw.mean()) / (raw.std() + 0.01), rtol=1e-6, atol=1e-7)
    expected = raw + samples.values_N
    np.testing.assert_allclose(targets_of(samples, AdvantageSettings(kind="gae")), expected, rtol=1e-6, atol=1e-7)


def test_an_answer_does_not_depend_on_others_in_the_batch() -> None:
    samples, options = made(), GaeOptions(normalise=False, bootstrap_cut=True, unit="turn")
    whole = np.split(gae.compute(samples, options), np.cumsum(LENGTHS)[:-1])
    firsts = np.cumsum([0, *LENGTHS])
    for number in range(5):
        tokens = slice(firsts[number], firsts[number + 1])
        of_one = slice(number, number + 1)
        alone = {
            name: value[tokens if name.endswith("_N") else of_one]
            for name, value in vars(samples).items()
            if value is not None
        }
        np.testing.assert_array_equal(gae.compute(RewardedSamples(**alone), options), whole[number])


def test_targets_of_a_users_advantage_must_be_finite_and_one_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AdvantageSettings(kind="gae")
    cases = ((np.zeros(3), r"targets of shape \[3\] for 19 tokens"), (np.full(19, np.nan), "not finite"))
    for targets, message in cases:
        own = replace(gae.ADVANTAGE, targets=lambda samples, options, result=targets: result)
        monkeypatch.setattr("trainer.objectives.advantage.advantage_of", lambda _, own=own: (own, GaeOptions()))
        with pytest.raises(UserError, match=message):
            targets_of(made(), settings)


# ---------------------------------------------------------------- the value loss


def loss_by_hand(value: float, start: float, target: float, clip: float | None) -> float:
    plain = (value - target) ** 2 / 2
    if clip is None:
        return plain
    return max(plain, (start + min(max(value - start, -clip), clip) - target) ** 2 / 2)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value_loss_and_its_gradient_match_the_formula(clip: float | None) -> None:
    rng = np.random.default_rng(1)
    value_N, start_N, target_N = rng.normal(size=(3, 400))
    values = torch.tensor(value_N, requires_grad=True)
    losses, is_clipped = value_loss(values, torch.tensor(start_N), torch.tensor(target_N), clip=clip)
    expected = [loss_by_hand(*row, clip) for row in zip(value_N, start_N, target_N, strict=True)]
    np.testing.assert_allclose(losses.detach(), expected, atol=1e-9)
    losses.sum().backward()
    step = 1e-6
    differences = [
        (loss_by_hand(v + step, s, r, clip) - loss_by_hand(v - step, s, r, clip)) / (2 * step)
        for v, s, r in zip(value_N, start_N, target_N, strict=True)
    ]
    assert values.grad is not None
    np.testing.assert_allclose(values.grad, differences, rtol=1e-6, atol=1e-8)
    share = is_clipped.double().mean()
    assert share == 0 if clip is None else 0.1 < share < 0.5
    assert not values.grad[is_clipped].any()


def test_gae_is_what_reads_values() -> None:
    assert reads_values(LossSettings(), AdvantageSettings(kind="gae"))
    assert reads_values(LossSettings(), AdvantageSettings(kind="my:own"))
    assert not reads_values(LossSettings(), AdvantageSettings(kind="grpo"))


@pytest.mark.parametrize("is_penalised", [False, True])
def test_rewards_by_turn_are_counted_at_the_last_token_of_their_turn(is_penalised: bool) -> None:
    samples = made(is_penalised=is_penalised)
    rewards = [None, None, TurnRewards(np.array([1, 2, 7]), np.array([0.5, 0.0, -2.0])), None, None]
    by_turn = replace(samples, turns_B=rewards)
    expected_N = samples.token_rewards_N()
    first, last = LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3]) - 1
    expected_N[last] -= samples.rewards_B[2]
    if samples.penalties_N is not None:  # the answer's reward is given without its penalties
        expected_N[last] -= samples.penalties_N[first : last + 1].sum()
    expected_N[[first, last]] += [0.5, -2.0]
    assert by_turn.token_rewards_N() == pytest.approx(expected_N)
