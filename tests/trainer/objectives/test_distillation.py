"""On-policy distillation: the advantage is the gradient of the reverse KL, and a step follows a teacher."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from rollout.config import EngineSettings
from rollout.engine.frozen import FrozenEngine
from rollout.models.port import TokenLogprobs
from rollout.models.teacher import with_teacher_logprobs
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import AdvantageSettings, OptimizerSettings, TeacherSettings, TrainerSettings
from trainer.data.batch import prepare_batch
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
HOSTED = TeacherSettings(model="big")


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


def trainer_of(model: PreTrainedModel, teacher: PreTrainedModel | None = None, **changes: Any) -> TrainStep:
    keys: dict[str, Any] = {
        "optimizer": OptimizerSettings(lr=3e-3), "advantage": AdvantageSettings(kind="distillation"),
        "teacher": HOSTED if teacher is None else TeacherSettings(path="teacher"), **changes,
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
    assert "requires a teacher" in fault.what
    assert fault.remedy == "trainer.teacher: {path: FOLDER}, or {model: NAME}"


# ------------------------------------------------------------ a teacher of the rollout workers


def taught(samples: list[BatchSample], place: int = 0, logprob: float | None = -1.5) -> list[BatchSample]:
    """The samples with a log-prob for each sampled token; the first of sample `place` is given, None: it has none."""
    found = []
    for number, sample in enumerate(samples):
        parts = []
        for one in sample.trajectories:
            said_T = np.where(one.loss_mask_T, -1.0 - np.arange(len(one)) / 8, 0.0).astype(np.float32)
            if number == place and logprob is not None:
                said_T[one.loss_mask_T.argmax()] = logprob
            is_missing = number == place and logprob is None
            parts.append(msgspec.structs.replace(one, teacher_logprobs_T=None if is_missing else said_T))
        found.append(msgspec.structs.replace(sample, trajectory=parts[0], others=tuple(parts[1:])))
    return found


def advantages_by_trajectory(trainer: TrainStep, samples: list[BatchSample]) -> dict[int, np.ndarray]:
    """The advantages that a step computes, by the place of the trajectory in the batch."""
    prepared = trainer.prepare(samples, 3)
    whole = trainer._with_step_advantages(prepared, trainer._proximal(prepared))
    assert "teacher_kl" in whole.metrics
    return {
        place: one.inputs.advantage_N.numpy()[one.packed.sequence_N.numpy() == number]
        for mini_batch in whole.mini_batches
        for one in mini_batch
        for number, place in enumerate(one.places_S)
    }


@pytest.mark.parametrize("tokens", [10_000, 20])
def test_a_teacher_gives_the_same_advantages_on_the_ranks_and_in_the_workers(
    tiny_model: Callable[..., Any], make_samples: Any, tmp_path: Path, tokens: int
) -> None:
    """By the engine that the workers host, with the code that they call; float32."""
    policy, teacher = tiny_model(), tiny_model(seed=7)
    teacher.save_pretrained(tmp_path / "teacher")
    samples = make_samples(GROUPS)
    samples[1] = msgspec.structs.replace(
        samples[1], others=(numbered(samples[2], 1),), trajectory=numbered(samples[1], 0)
    )
    engine = FrozenEngine(
        tmp_path / "teacher", EngineSettings(device="cpu", num_slots=1, max_context=64), dtype="float32", num_threads=1
    )

    async def ask() -> list[BatchSample]:
        await engine.start()
        try:
            await engine.load_folder(0)
            model: Any = Hosted(engine)
            found = []
            for sample in samples:
                main, *others = await with_teacher_logprobs(sample.trajectories, model, 0.9)
                found.append(msgspec.structs.replace(sample, trajectory=main, others=tuple(others)))
            return found
        finally:
            await engine.close()

    held = advantages_by_trajectory(trainer_of(policy, teacher, micro_batch_tokens=tokens), samples)
    hosted = advantages_by_trajectory(trainer_of(policy, micro_batch_tokens=tokens), asyncio.run(ask()))
    assert held.keys() == hosted.keys() == set(range(len(samples) + 1))
    for place, expected in held.items():
        np.testing.assert_allclose(hosted[place], expected, atol=1e-4)
    assert max(float(np.abs(one).max()) for one in held.values()) > 0.5


def numbered(sample: BatchSample, number: int) -> Trajectory:
    """Its trajectory as one of several of a sample."""
    ends, ids = np.array([sample.trajectory.num_sampled], np.int32), np.array([number], np.int32)
    return msgspec.structs.replace(sample.trajectory, answer_ends_A=ends, answer_ids_A=ids)


class Hosted:
    """A called model over an engine alone."""

    def __init__(self, engine: FrozenEngine) -> None:
        self.engine = engine

    async def logprobs(self, prompt: np.ndarray, tokens: np.ndarray, *, temperature: float) -> TokenLogprobs:
        logprobs_R, version = await self.engine.logprobs(prompt, tokens, temperature)
        return TokenLogprobs(logprobs_R=logprobs_R, model="big", version=version)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_the_log_probs_of_the_whole_batch(make_samples: Any, rank: int) -> None:
    settings = TrainerSettings(advantage=AdvantageSettings(kind="distillation"), teacher=HOSTED)
    batch = taught(make_samples(GROUPS))
    found = prepare_batch(batch, 3, settings, rank=rank, num_ranks=2).rewards.teacher_N
    expected = np.concatenate([one.trajectory.teacher_logprobs_T[one.trajectory.loss_mask_T] for one in batch])  # type: ignore[index]
    assert found is not None
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("logprob", "words"),
    [
        (
            None,
            "sample 2 of group 0 has no log-probs of the teacher `big`, because it was generated without this setting",
        ),
        (-np.inf, "sample 2 of group 0: the log-prob of sampled token 0 under the teacher `big` is -inf"),
        (np.nan, "sample 2 of group 0: the log-prob of sampled token 0 under the teacher `big` is nan"),
    ],
)
def test_a_sample_without_its_log_probs_ends_the_run_with_its_name(
    make_samples: Any, logprob: float | None, words: str
) -> None:
    settings = TrainerSettings(advantage=AdvantageSettings(kind="distillation"), teacher=HOSTED)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        prepare_batch(taught(make_samples(GROUPS), 2, logprob), 3, settings)
    assert caught.value.where == "trainer.teacher.model"


def test_log_probs_that_nobody_asks_for_are_left_out(make_samples: Any) -> None:
    assert prepare_batch(taught(make_samples(GROUPS), 2, np.nan), 3, TrainerSettings()).rewards.teacher_N is None
