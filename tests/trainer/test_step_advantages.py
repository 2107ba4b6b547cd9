"""The divergence from the reference model is taken off the rewards, on whatever ranks the samples are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import AdvantageSettings, CriticSettings, LossSettings, OptimizerSettings, TrainerSettings
from trainer.data.batch import PreparedBatch, prepare_batch
from trainer.model.attention import AttentionChoice
from trainer.objectives.advantage import advantages, spread
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model
from trainer.step_advantages import _value_metrics, step_advantages

GROUPS = (4, 2, 3, 1)
COEF = 0.3


def _settings(kind: str = "grpo_no_std", estimator: Any = "k1", **changes: Any) -> TrainerSettings:
    loss = LossSettings(kl_coef=COEF, kl_in="reward", kl_estimator=estimator)
    keys = {"loss": loss, "advantage": AdvantageSettings(kind=kind), "micro_batch_tokens": 24, "mini_batches": 2}
    return TrainerSettings(**{**keys, **changes})


class OneOfSeveral:
    """A rank whose peers' penalties are known."""

    device = torch.device("cpu")

    def __init__(self, others: torch.Tensor) -> None:
        self._others = others
        self.own = torch.zeros(0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.own = values
        return values + self._others


def _reference(prepared: PreparedBatch) -> dict[tuple[int, int], torch.Tensor]:
    """Made-up log-probs that depend on the token alone."""
    return {
        (number, place): -0.1 * (micro_batch.packed.targets_N % 17).float() - 0.2
        for number, mini_batch in enumerate(prepared.mini_batches)
        for place, micro_batch in enumerate(mini_batch)
    }


def _oracle(samples: Any, settings: TrainerSettings) -> list[np.ndarray]:
    """Advantages of every sample, computed sample by sample."""
    penalties = []
    for sample in samples:
        mask = sample.trajectory.loss_mask_T
        r = -0.1 * (sample.trajectory.tokens_T[mask] % 17) - 0.2
        b = sample.trajectory.logprobs_T[mask].astype(np.float64)
        k = {"k1": b - r, "k2": (b - r) ** 2 / 2, "k3": np.exp(r - b) - (r - b) - 1}
        penalties.append(COEF * k[settings.loss.kl_estimator])
    rewards = np.array([sample.reward - part.sum() for sample, part in zip(samples, penalties, strict=True)])
    groups = np.array([sample.group_id for sample in samples])
    if settings.advantage.kind == "reinforce_pp":
        returns = [
            np.array([sample.reward - part[t:].sum() for t in range(len(part))])
            for sample, part in zip(samples, penalties, strict=True)
        ]
        flat = np.concatenate(returns)
        return [(part - flat.mean()) / (flat.std() + settings.advantage.std_eps) for part in returns]
    lengths = [len(part) for part in penalties]
    return spread(advantages(rewards, groups, lengths, settings.advantage), [(length,) for length in lengths])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["grpo_no_std", "reinforce_pp"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_advantages_are_those_of_penalised_rewards_on_every_rank(
    num_ranks: int, kind: str, estimator: str, make_samples: Any
) -> None:
    samples, settings = make_samples(GROUPS), _settings(kind, estimator)
    expected = _oracle(samples, settings)
    made = [prepare_batch(samples, 3, settings, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    alone = [OneOfSeveral(torch.zeros(1)) for _ in made]
    for prepared, ranks in zip(made, alone, strict=True):
        step_advantages(prepared, settings, ranks, references=_reference(prepared))  # type: ignore[arg-type]
    seen = set()
    for rank, prepared in enumerate(made):
        others = sum((one.own for number, one in enumerate(alone) if number != rank), torch.zeros(1))
        ranks = OneOfSeveral(others)
        changed = step_advantages(prepared, settings, ranks, references=_reference(prepared))  # type: ignore[arg-type]
        for micro_batch in (one for mini_batch in changed.mini_batches for one in mini_batch if not one.is_dummy):
            want = np.concatenate([expected[sample] for sample in micro_batch.places_S])
            np.testing.assert_allclose(micro_batch.inputs.advantage_N, want, rtol=1e-4, atol=1e-5)
            assert not micro_batch.is_silent
            seen |= set(micro_batch.places_S)
    assert seen == set(range(len(samples)))


def test_step_takes_the_reference_into_the_reward_and_not_into_the_loss(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    settings = _settings("reinforce_pp", optimizer=OptimizerSettings(lr=0.0))
    samples = make_samples(GROUPS)
    metrics = {}
    for name, seed in (("same", 0), ("other", 1)):
        model = tiny_model()
        attention = AttentionChoice("sdpa", "test")
        setup = Setup(settings, temperature=0.9, num_steps=10, attention=attention, ranks=Ranks.alone())
        ready_model(model, setup)
        step = TrainStep(TorchBackend(model, setup), setup, groups_per_step=8, reference=tiny_model(seed=seed))
        metrics[name] = step.run(step.prepare(samples, version=3))
    assert metrics["same"]["kl_reward"] != metrics["other"]["kl_reward"]
    assert metrics["same"]["grad_norm"] > 0
    assert "kl_reference" not in metrics["same"]


def test_rank_that_only_keeps_the_others_company_has_no_penalty_of_its_own(make_samples: Any) -> None:
    samples, settings = make_samples((2,)), _settings(mini_batches=1)
    prepared = [prepare_batch(samples, 3, settings, rank=rank, num_ranks=3) for rank in range(3)]
    (company,) = [one for one in prepared if one.mini_batches[0][0].is_dummy]
    others = torch.linspace(-1.0, 1.0, sum(company.rewards.lengths_B), dtype=torch.float64)
    ranks = OneOfSeveral(others)
    changed = step_advantages(company, settings, ranks, references=_reference(company))  # type: ignore[arg-type]
    assert not ranks.own.any()
    assert changed.mini_batches == company.mini_batches
    assert changed.metrics["kl_reward"] == pytest.approx(float(others.mean()))
    penalised = advantages(
        company.rewards.rewards_B, company.rewards.group_ids_B, company.rewards.lengths_B, settings.advantage,
        penalties_N=COEF * others.numpy(),
    )  # fmt: skip
    assert changed.metrics["advantage_abs_mean"] == pytest.approx(float(np.abs(penalised).mean()))
    assert changed.metrics["sequences"] == 2.0


def test_values_of_all_ranks_make_the_advantages_and_a_filler_gets_zeros(make_samples: Any) -> None:
    settings = TrainerSettings(
        critic=CriticSettings(), advantage=AdvantageSettings(kind="gae", options={"normalise": False}),
        micro_batch_tokens=24, mini_batches=1,
    )  # fmt: skip
    samples = make_samples((2,))
    prepared = [prepare_batch(samples, 3, settings, rank=rank, num_ranks=3) for rank in range(3)]
    (company,) = [one for one in prepared if one.mini_batches[0][0].is_dummy]
    values_N = torch.linspace(-1.0, 1.0, sum(company.rewards.lengths_B), dtype=torch.float64)
    ends_Q = torch.tensor([0.5, -0.5], dtype=torch.float64)
    given: list[torch.Tensor] = [values_N, ends_Q]

    class Others(OneOfSeveral):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            assert not values.any(), "a filler adds nothing"
            return values + given[values.numel() == 2]

    made_up = {(0, 0): (torch.ones(99), torch.ones(99))}
    changed = step_advantages(company, settings, Others(values_N), values=made_up)  # type: ignore[arg-type]
    inputs, before = changed.mini_batches[0][0].inputs, company.mini_batches[0][0].inputs
    assert inputs.values_N is not None
    assert inputs.target_N is not None
    for numbers_N in (inputs.advantage_N, inputs.values_N, inputs.target_N):
        assert numbers_N.tolist() == [0.0] * len(before.behaviour_N)
    own = [one for one in prepared if not one.mini_batches[0][0].is_dummy]
    targets = []
    for one in own:
        (micro_batch,) = one.mini_batches[0]
        (place,) = micro_batch.places_S
        start = sum(one.rewards.lengths_Q[:place])
        span = slice(start, start + one.rewards.lengths_Q[place])

        class Rest(OneOfSeveral):
            def sum(self, values: torch.Tensor) -> torch.Tensor:
                rest = given[values.numel() == 2].clone()
                rest[span if values.numel() > 2 else place] = 0.0  # noqa: B023
                return values + rest

        mine = {(0, 0): (values_N[span].float(), ends_Q[place : place + 1].float())}
        found = step_advantages(one, settings, Rest(values_N), values=mine)  # type: ignore[arg-type]
        assert found.metrics == pytest.approx(changed.metrics, rel=1e-6)
        np.testing.assert_allclose(found.mini_batches[0][0].inputs.values_N, values_N[span], rtol=1e-6)
        targets.append(found.mini_batches[0][0].inputs.target_N)
    flat = torch.cat(targets).double()
    assert changed.metrics["value_target_mean"] == pytest.approx(float(flat.mean()), rel=1e-5)
    assert changed.metrics["value_mean"] == pytest.approx(0.0, abs=1e-9)


def test_explained_variance_is_zero_where_all_targets_are_equal() -> None:
    values_N, targets_N = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0])
    found = _value_metrics(values_N, targets_N)
    assert found["explained_variance"] == pytest.approx(1 - np.var(targets_N - values_N) / np.var(targets_N))
    assert (found["value_mean"], found["value_target_mean"]) == (pytest.approx(7 / 3), 2.0)
    assert _value_metrics(values_N, np.full(3, 2.0))["explained_variance"] == 0.0
