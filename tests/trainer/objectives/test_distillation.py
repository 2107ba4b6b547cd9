"""On-policy distillation: the advantage is the gradient of the reverse KL, and a step follows a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import AdvantageSettings, OptimizerSettings, TeacherSettings, TrainerSettings
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.objectives.advantages.distillation import Options, compute, metrics
from trainer.objectives.port import RewardedSamples
from trainer.objectives.registry import advantage_faults
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

SDPA = AttentionChoice("sdpa", "test")
GROUPS = (3, 2, 1)


def samples(seed: int = 0, **changes: Any) -> RewardedSamples:
    rng = np.random.default_rng(seed)
    lengths_B = np.array([2, 3, 1, 2])
    keys: dict[str, Any] = {
        "rewards_B": np.array([1.0, 0.0, 0.5, 0.5]), "group_ids_B": np.array([0, 0, 1, 1]), "lengths_B": lengths_B,
        "start_N": rng.normal(-1, 1, 8), "teacher_N": rng.normal(-1, 1, 8), **changes,
    }  # fmt: skip
    return RewardedSamples(**keys)


def test_the_advantage_is_the_log_ratio_of_each_token() -> None:
    x = samples()
    np.testing.assert_allclose(compute(x, Options(clip=None)), x.teacher_N - x.start_N)
    np.testing.assert_allclose(
        compute(x, Options(coef=0.5, clip=0.1)), 0.5 * np.clip(x.teacher_N - x.start_N, -0.1, 0.1)
    )
    assert metrics(x, Options()) == {"teacher_kl": pytest.approx((x.start_N - x.teacher_N).mean())}


def test_rewards_are_added_by_their_weight_relative_to_the_group() -> None:
    x = samples()
    more = compute(x, Options(reward_coef=2.0)) - compute(x, Options())
    np.testing.assert_allclose(more, [1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0])


def test_its_mean_gradient_is_that_of_the_kl_to_the_teacher() -> None:
    """One token from a softmax: sum over all tokens of p A d log p equals minus d KL(p, teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, dtype=torch.float64, generator=generator), 0)
    logp = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)
    x = samples(
        rewards_B=np.zeros(7), group_ids_B=np.arange(7), lengths_B=np.ones(7, int),
        start_N=logp.detach().numpy(), teacher_N=teacher.numpy(),
    )  # fmt: skip
    advantage = torch.from_numpy(compute(x, Options(clip=None)))
    logp = torch.log_softmax(logits, 0)
    (found,) = torch.autograd.grad(-(logp.detach().exp() * advantage * logp).sum(), logits)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-12)


def trainer_of(model: PreTrainedModel, teacher: PreTrainedModel | None, **changes: Any) -> TrainStep:
    keys: dict[str, Any] = {
        "optimizer": OptimizerSettings(lr=3e-3), "advantage": AdvantageSettings(kind="distillation"),
        "teacher": TeacherSettings(path="teacher"), **changes,
    }  # fmt: skip
    setup = Setup(TrainerSettings(**keys), temperature=0.9, num_steps=40, attention=SDPA, ranks=Ranks.alone())
    ready_model(model, setup)
    return TrainStep(TorchBackend(model, setup), setup, groups_per_step=8, teacher=teacher)


def logprobs(model: PreTrainedModel, sample: Any) -> np.ndarray:
    attach(model, SDPA)
    t = sample.trajectory
    packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
    with torch.no_grad():
        found, _ = token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)
    return found.numpy()


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("tokens", [10_000, 20])
def test_a_step_takes_the_log_probs_of_policy_and_teacher(
    tiny_model: Callable[..., Any], make_samples: Any, mini_batches: int, tokens: int
) -> None:
    policy, teacher = tiny_model(), tiny_model(seed=7)
    trainer = trainer_of(policy, teacher, mini_batches=mini_batches, micro_batch_tokens=tokens)
    batch = make_samples(GROUPS)
    prepared = trainer.prepare(batch, 3)
    whole = trainer._with_step_advantages(prepared, trainer._proximal(prepared))
    num_seen = 0
    for mini_batch in whole.mini_batches:
        for one in mini_batch:
            for number, place in enumerate(one.places_S):
                expected = logprobs(teacher, batch[place]) - logprobs(policy, batch[place])
                found = one.inputs.advantage_N.numpy()[one.packed.sequence_N.numpy() == number]
                np.testing.assert_allclose(found, expected, atol=1e-5)
                num_seen += 1
    assert num_seen == len(batch)


def test_training_brings_log_probs_closer_and_leaves_the_teacher_as_it_is(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    teacher = tiny_model(seed=7)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    trainer = trainer_of(tiny_model(), teacher)
    steps = [trainer.run(trainer.prepare(make_samples(GROUPS), 3 + step)) for step in range(30)]
    assert steps[-1]["advantage_abs_mean"] < 0.8 * steps[0]["advantage_abs_mean"], "the mean |log-ratio| of the tokens"
    assert all("teacher_kl" in step for step in steps)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_without_a_teacher_it_is_refused() -> None:
    (fault,) = advantage_faults(AdvantageSettings(kind="distillation"), 4)
    assert "needs a teacher" in fault.what
    assert fault.remedy == "trainer.teacher: {path: FOLDER}"
