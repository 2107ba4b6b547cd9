"""Online DPO: the gradient of a step is that of the published pairwise losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import AdvantageSettings, LossSettings, OptimizerSettings, TrainerSettings, WeightClip
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.objectives.advantages.online_dpo import Options, compute, metrics, pairs_of
from trainer.objectives.port import RewardedSamples
from trainer.objectives.registry import loss_faults
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

SDPA = AttentionChoice("sdpa", "test")
GROUPS = (4, 2, 3)
LOSS = LossSettings(aggregation="constant", weight=WeightClip(mode="off"))


def pair_loss(margin: torch.Tensor, options: Options) -> torch.Tensor:
    """arXiv 2305.18290 eq. 7; 2310.12036 eq. 17."""
    if options.loss == "ipo":
        return (margin - 1 / (2 * options.beta)) ** 2
    return -torch.nn.functional.logsigmoid(options.beta * margin)


def group_loss(gains: list[torch.Tensor], rewards: list[float], options: Options) -> torch.Tensor | None:
    """Mean over the pairs of one group; None without a pair. gains: log-prob minus reference, of each sample."""
    pairs = [(i, j) for i, j in itertools.permutations(range(len(rewards)), 2) if rewards[i] > rewards[j]]
    if options.pairs == "best_worst" and pairs:
        pairs = [(int(np.argmax(rewards)), int(np.argmin(rewards)))]
    losses = [pair_loss(gains[i] - gains[j], options) for i, j in pairs]
    return torch.stack(losses).mean() if losses else None


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("pairs", ["all", "best_worst"])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_minus_the_derivative_of_the_loss(loss: Any, pairs: Any, seed: int) -> None:
    rng, options = np.random.default_rng(seed), Options(beta=0.3, loss=loss, pairs=pairs)
    rewards_B, group_ids_B = np.array([0.0, 1.0, 1.0, 0.5, 2.0, 2.0, 7.0]), np.array([0, 1, 0, 0, 1, 1, 2])
    lengths_B = rng.integers(1, 4, 7)
    start_N, reference_N = rng.normal(-1, 1, (2, lengths_B.sum()))
    x = RewardedSamples(rewards_B, group_ids_B, lengths_B, start_N=start_N, reference_N=reference_N)
    found = compute(x, options)
    gains = [part.sum() for part in np.split(start_N - reference_N, np.cumsum(lengths_B)[:-1])]
    for group in range(3):
        members = np.flatnonzero(group_ids_B == group)
        leaves = [torch.tensor(gains[one], requires_grad=True) for one in members]
        value = group_loss(leaves, rewards_B[members].tolist(), options)
        if value is None:
            assert not found[members].any()
            continue
        slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        expected = [0.0 if one is None else -len(members) * float(one) for one in slopes]
        np.testing.assert_allclose(found[members], expected, atol=1e-12)


def test_pairs_and_metrics() -> None:
    chosen, rejected = pairs_of(np.array([0.0, 2.0, 1.0]), "all")
    assert sorted(zip(chosen.tolist(), rejected.tolist(), strict=True)) == [(1, 0), (1, 2), (2, 0)]
    assert [one.tolist() for one in pairs_of(np.array([0.0, 2.0, 1.0]), "best_worst")] == [[1], [0]]
    assert all(not len(one) for one in pairs_of(np.array([1.0, 1.0]), "best_worst"))
    x = RewardedSamples(
        np.array([0.0, 1.0, 1.0]), np.zeros(3, int), np.array([1, 1, 2]), start_N=np.array([-1.0, -2.0, -1.0, 0.0]),
        reference_N=np.array([-1.0, -1.0, -1.5, -1.0]),
    )  # fmt: skip
    assert metrics(x, Options()) == {"dpo_pairs": 2.0, "dpo_accuracy": 0.5, "dpo_margin": 0.25}
    equal = RewardedSamples(np.ones(1), np.zeros(1, int), np.ones(1, int), start_N=np.zeros(1), reference_N=np.zeros(1))
    assert metrics(equal, Options()) == {"dpo_pairs": 0.0}


def trainer_of(model: PreTrainedModel, reference: PreTrainedModel, **changes: Any) -> TrainStep:
    keys: dict[str, Any] = {
        "optimizer": OptimizerSettings(lr=1e-2, max_grad_norm=1e9), "loss": LOSS,
        "advantage": AdvantageSettings(kind="online_dpo", options={"beta": 0.2}), **changes,
    }  # fmt: skip
    setup = Setup(TrainerSettings(**keys), temperature=0.9, num_steps=10, attention=SDPA, ranks=Ranks.alone())
    ready_model(model, setup)
    return TrainStep(TorchBackend(model, setup), setup, groups_per_step=8, reference=reference)


def sequence_logprob(model: PreTrainedModel, sample: Any) -> torch.Tensor:
    attach(model, SDPA)
    t = sample.trajectory
    packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
    return token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)[0].sum()


@pytest.mark.parametrize("tokens", [10_000, 20])
def test_the_gradient_of_a_step_is_that_of_the_mean_pair_loss(
    tiny_model: Callable[..., Any], make_samples: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_samples(GROUPS)
    policy, reference = tiny_model(), tiny_model(seed=7)
    trainer = trainer_of(policy, reference, micro_batch_tokens=tokens)
    seen: dict[str, torch.Tensor] = {}
    update = trainer.policy.update

    def watched(step: int, **keys: Any) -> Any:
        seen.update({name: one.clone() for name, one in trainer.policy.own_gradients().items()})
        return update(step, **keys)

    monkeypatch.setattr(trainer.policy, "update", watched)
    metrics_of_step = trainer.run(trainer.prepare(batch, 3))
    oracle = tiny_model()
    losses = []
    for group in range(len(GROUPS)):
        members = [one for one in batch if one.group_id == group]
        gains = [sequence_logprob(oracle, one) - sequence_logprob(reference, one).detach() for one in members]
        losses.append(group_loss(gains, [one.reward for one in members], Options(beta=0.2)))
    # the step weighs samples alike: a group counts by its samples
    sizes = torch.tensor([float(size) for size, one in zip(GROUPS, losses, strict=True) if one is not None])
    value = (torch.stack([one for one in losses if one is not None]) * sizes).sum() / sum(GROUPS)
    value.backward()
    expected = torch.cat([one.grad.flatten() for one in oracle.parameters() if one.grad is not None])
    found = torch.cat([seen[name].flatten() for name, one in oracle.named_parameters() if one.grad is not None])
    assert float((found - expected).norm() / expected.norm()) < 1e-5  # computed in float32
    assert metrics_of_step["dpo_pairs"] > 0


def test_the_reference_holds_and_margins_grow(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    trainer = trainer_of(tiny_model(), tiny_model(), optimizer=OptimizerSettings(lr=3e-3))
    rows = [trainer.run(trainer.prepare(make_samples(GROUPS), 3 + step)) for step in range(12)]
    assert rows[0]["dpo_margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[-1]["dpo_margin"] > 0.1
    assert rows[-1]["dpo_accuracy"] > rows[1]["dpo_accuracy"] - 1e-9


def test_no_weight_is_needed_for_it_and_one_is_for_others() -> None:
    assert list(loss_faults(LOSS, is_for_any_policy=True)) == []
    assert [fault.key for fault in loss_faults(LOSS)] == ["trainer.loss.weight.mode"]
