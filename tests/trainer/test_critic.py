"""A critic in training: its values, its loss however a step is cut, its warm-up, its place in checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import UserError, WeightError
from areal_like.trajectory import Trajectory
from areal_like.weights.weight_store import open_payload
from areal_like.wire.messages import BatchSample
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.checkpoints import checkpoint
from trainer.checkpoints.convert import stored_tensors
from trainer.config import AdvantageSettings, CriticSettings, LossSettings, OptimizerSettings, TrainerSettings
from trainer.critic import Critic
from trainer.critic_state import load_critic_weights
from trainer.data.batch import BatchRewards, prepare_batch
from trainer.export import write_model
from trainer.model.attention import AttentionChoice
from trainer.model.tokenizers import build_tokenizer
from trainer.model.values import load_critic
from trainer.objectives import registry
from trainer.objectives.advantages import gae
from trainer.objectives.port import Needs, RewardedSamples
from trainer.optimizer import UpdateResult
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_critic, ready_model
from trainer.training import Training

GROUPS = (4, 2, 3, 1)
RAW: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8, "normalise": False, "bootstrap_cut": True}


def settings_of(critic: CriticSettings | None = None, **changes: Any) -> TrainerSettings:
    """Of a step with a critic whose learning rate is 0.01."""
    keys: dict[str, Any] = {
        "critic": critic or CriticSettings(optimizer=OptimizerSettings(lr=0.01)),
        "optimizer": OptimizerSettings(lr=1e-3),
        "advantage": AdvantageSettings(kind="gae", options=RAW),
        "micro_batch_tokens": 40,
        "mini_batches": 2,
    }
    return TrainerSettings(**{**keys, **changes})


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    """A prepared model."""
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_model(tiny_model(), prepared, dtype="float32")
    build_tokenizer("characters:running_sum", None).save_pretrained(prepared)
    return prepared


@pytest.fixture
def samples(make_samples: Callable[..., list[BatchSample]]) -> list[BatchSample]:
    """Ten samples, three of which were cut."""
    return [
        msgspec.structs.replace(one, trajectory=msgspec.structs.replace(one.trajectory, finish_reason="length"))
        if number % 4 == 0
        else one
        for number, one in enumerate(make_samples(GROUPS))
    ]


def made(
    folder: Path, policy: PreTrainedModel, settings: TrainerSettings, *, head_seed: int | None = 5, **changes: Any
) -> TrainStep:
    """A step whose critic's head is random, so that values differ."""
    setup = Setup(settings, 0.9, num_steps=10, attention=AttentionChoice("sdpa", "test"), ranks=Ranks.alone())
    ready_model(policy, setup)
    model = load_critic(folder)
    if head_seed is not None:
        torch.nn.init.normal_(
            model.get_output_embeddings().weight, std=0.3, generator=torch.Generator().manual_seed(head_seed)
        )
    ready_critic(model, setup)
    assert settings.critic is not None
    critic = Critic(TorchBackend(model, setup.for_critic()), settings.critic, setup.ranks)
    return TrainStep(TorchBackend(policy, setup), setup, groups_per_step=8, critic=critic, **changes)


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def values_of(model: PreTrainedModel, sample: BatchSample) -> np.ndarray:
    """The value after each token of one sequence, by plain transformers."""
    ids = torch.from_numpy(sample.trajectory.tokens_T.astype(np.int64))[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return (hidden @ model.get_output_embeddings().weight.detach()[0]).detach().double().numpy()


def summed_gradients(critic: Critic) -> dict[str, torch.Tensor]:
    """Filled by the updates to come: the sum of their gradients, by parameter."""
    total: dict[str, torch.Tensor] = {}
    right = critic.backend.update

    def update(step: int) -> Any:
        for name, parameter in critic.backend.model.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad
        return right(step)

    critic.backend.update = update  # type: ignore[method-assign]
    return total


# ---------------------------------------------------------------- one step


def test_a_step_has_the_advantages_and_losses_of_values_computed_sequence_by_sequence(
    folder: Path, tiny_model: Any, samples: list[BatchSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(CriticSettings(optimizer=OptimizerSettings(lr=0.0)), optimizer=OptimizerSettings(lr=0.0))
    step = made(folder, tiny_model(), settings)
    assert step.critic is not None
    plain = load_critic(folder)
    plain.load_state_dict(step.critic.backend.model.state_dict())
    masks = [sample.trajectory.loss_mask_T for sample in samples]
    values = [values_of(plain, sample) for sample in samples]
    batch = RewardedSamples(
        np.array([sample.reward for sample in samples]),
        np.array([sample.group_id for sample in samples]),
        np.array([mask.sum() for mask in masks]),
        values_N=np.concatenate([value[:-1][mask[1:]] for value, mask in zip(values, masks, strict=True)]),
        end_values_Q=np.array([value[-1] for value in values]),
        is_cut_Q=np.array([sample.trajectory.finish_reason == "length" for sample in samples]),
    )
    options = gae.GaeOptions(**RAW)
    expected = np.split(gae.compute(batch, options), np.cumsum(batch.lengths_B)[:-1])
    errors = gae.targets(batch, options) - batch.values_N
    seen = {}
    right = Critic.backward

    def look(self: Critic, micro_batch: Any, *, is_last: bool) -> None:
        parts = micro_batch.inputs.advantage_N.split([int(batch.lengths_B[s]) for s in micro_batch.places_S])
        seen.update(zip(micro_batch.places_S, parts, strict=True))
        right(self, micro_batch, is_last=is_last)

    monkeypatch.setattr(Critic, "backward", look)
    metrics = step.run(step.prepare(samples, version=3))
    for number, advantages in enumerate(expected):
        np.testing.assert_allclose(seen[number], advantages, rtol=1e-4, atol=1e-5)
    assert metrics["value_loss"] == pytest.approx((errors**2).mean() / 2, rel=1e-4)
    explained = 1 - errors.var() / gae.targets(batch, options).var()
    assert metrics["explained_variance"] == pytest.approx(explained, rel=1e-3)
    assert metrics["value_mean"] == pytest.approx(batch.values_N.mean(), rel=1e-3, abs=1e-4)
    assert metrics["advantage_abs_mean"] == pytest.approx(np.abs(np.concatenate(expected)).mean(), rel=1e-4)
    assert metrics["value_clip_fraction"] == 0


def test_a_turn_begins_where_sampled_tokens_follow_others(samples: list[BatchSample]) -> None:
    mask_T = np.array([False, True, True, False, False, True, False, True, True])
    sampled_T = np.where(mask_T, 0, -1).astype(np.int32)
    trajectory = Trajectory(
        tokens_T=np.arange(3, 12, dtype=np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, -0.5, 0.0).astype(np.float32),
        versions_T=sampled_T,
        finish_reason="environment",
    )
    rewards = BatchRewards.of([msgspec.structs.replace(samples[1], trajectory=trajectory), samples[0]])
    num_other = samples[0].trajectory.num_sampled
    assert rewards.lengths_B == (5, num_other)
    starts = [True, False, True, True, False]
    assert rewards.turn_starts_N.tolist() == [*starts, True, *[False] * (num_other - 1)]
    assert rewards.is_cut_Q.tolist() == [False, True]


def test_micro_batches_and_mini_batches_change_neither_gradient_nor_loss_of_the_critic(
    folder: Path, tiny_model: Any, samples: list[BatchSample]
) -> None:
    results = []
    for tokens, mini_batches in ((10_000, 1), (40, 1), (17, 1), (40, 3)):
        frozen = OptimizerSettings(lr=0.0)
        settings = settings_of(
            CriticSettings(optimizer=frozen), optimizer=frozen, micro_batch_tokens=tokens, mini_batches=mini_batches
        )
        step = made(folder, tiny_model(), settings)
        assert step.critic is not None
        total = summed_gradients(step.critic)
        metrics = step.run(step.prepare(samples, version=3))
        results.append((torch.cat([gradient.flatten() for gradient in total.values()]) / mini_batches, metrics))
    first, metrics = results[0]
    assert first.norm() > 0.01
    for gradient, others in results[1:]:
        assert (gradient - first).norm() / first.norm() < 1e-4
        for name in ("value_loss", "explained_variance", "value_mean", "value_target_mean", "advantage_abs_mean"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-4), name


def test_warm_up_trains_the_critic_alone(folder: Path, tiny_model: Any, samples: list[BatchSample]) -> None:
    settings = settings_of(CriticSettings(optimizer=OptimizerSettings(lr=0.01), warmup_steps=2))
    step = made(folder, tiny_model(), settings)
    assert step.critic is not None
    policy, critic = step.policy.model, step.critic.backend.model
    for version, is_moving in ((0, False), (1, False), (2, True)):
        before = weights(policy), weights(critic)
        metrics = step.run(step.prepare(samples, version=version))
        assert torch.equal(before[0], weights(policy)) is not is_moving
        assert not torch.equal(before[1], weights(critic))
        assert metrics["updates"] == (2 if is_moving else 0)
        assert metrics["critic_updates"] == 2
        assert metrics["skipped_updates"] == 0


def test_critic_learns_what_a_token_is_worth(folder: Path, tiny_model: Any, make_samples: Any) -> None:
    """The prompt decides the reward, and the policy is frozen: targets are the same in every step."""
    settings = settings_of(
        CriticSettings(optimizer=OptimizerSettings(lr=0.01), value_clip=None, warmup_steps=100),
        advantage=AdvantageSettings(kind="gae", options={"gae_lambda": 1.0}),
    )
    step = made(folder, tiny_model(), settings, head_seed=None)
    batch = [
        msgspec.structs.replace(sample, reward=float(sample.group_id))
        for sample in make_samples((6, 6, 6), max_answer=8)
    ]
    metrics = [step.run(step.prepare(batch, version=version)) for version in range(12)]
    assert metrics[0]["value_mean"] == 0, "the head begins at zero"
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"] / 10
    assert metrics[-1]["explained_variance"] > 0.8
    assert metrics[0]["explained_variance"] == pytest.approx(0, abs=1e-6)


def test_a_critic_without_gae_gives_a_loss_of_the_users_its_values(
    folder: Path, tiny_model: Any, samples: list[BatchSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    right = registry.OBJECTIVES["decoupled_ppo"]

    def loss(current_N: Any, tokens: Any, options: Any) -> Any:
        given.append((tokens.values_N, tokens.target_N))
        return right.loss(current_N, tokens, options)

    monkeypatch.setitem(registry.OBJECTIVES, "decoupled_ppo", replace(right, loss=loss, needs=Needs(values=True)))  # type: ignore[arg-type]
    settings = settings_of(advantage=AdvantageSettings(kind="grpo"))
    assert registry.reads_values(settings.loss, settings.advantage)
    step = made(folder, tiny_model(), settings)
    metrics = step.run(step.prepare(samples, version=3))
    assert all(values_N.shape == target_N.shape for values_N, target_N in given)
    assert torch.cat([target_N for _, target_N in given]).unique().tolist() == [0, 1, 2], "the rewards"
    assert metrics["advantage_abs_mean"] > 0


def test_kl_in_the_reward_and_a_critic_together_change_the_targets(
    folder: Path, tiny_model: Any, samples: list[BatchSample]
) -> None:
    found = []
    for kl_coef in (0.0, 0.5):
        loss = LossSettings(kl_coef=kl_coef, kl_in="reward", kl_estimator="k1") if kl_coef else LossSettings()
        settings = settings_of(loss=loss)
        step = made(folder, tiny_model(), settings, reference=tiny_model(seed=1) if kl_coef else None)
        found.append(step.run(step.prepare(samples, version=3)))
    assert "kl_reward" in found[1]
    assert found[1]["value_target_mean"] != found[0]["value_target_mean"]


class PlayedBackend:
    """Values are one number for every token; notes what the critic asks for."""

    def __init__(self) -> None:
        self.model: Any = None
        self.value = torch.nn.Parameter(torch.tensor(2.0))
        self.calls: list[Any] = []

    def logprobs(self, packed: Any, *, with_entropy: bool) -> tuple[torch.Tensor, None]:
        assert not with_entropy
        return self.value * torch.arange(1.0, packed.num_tokens + 1), None

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self.calls.append((float(loss.detach()), is_last))
        loss.backward()

    def update(self, step: int) -> UpdateResult:
        self.calls.append(f"update {step}")
        return UpdateResult(0.5 * step, 0.1, True)


def with_targets(batch: Any, value: float, target: float) -> Any:
    inputs = batch.inputs
    numbers = [torch.full_like(inputs.behaviour_N, number) for number in (value, target)]
    return replace(batch, inputs=replace(inputs, values_N=numbers[0], target_N=numbers[1]))


def test_a_micro_batch_that_counts_for_nothing_has_a_loss_of_exactly_zero_and_is_in_no_sum(
    samples: list[BatchSample],
) -> None:
    backend: Any = PlayedBackend()
    settings = settings_of(micro_batch_tokens=10_000, mini_batches=1)
    prepared = prepare_batch(samples, 3, settings)
    assert settings.critic is not None
    critic = Critic(backend, settings.critic.model_copy(update={"value_clip": 0.5}), Ranks.alone())
    own = with_targets(prepared.mini_batches[0][0], 0.0, 1.0)
    critic.begin(prepared)
    critic.zero_grad()
    critic.backward(own, is_last=False)
    once = backend.value.grad.clone()
    critic.backward(replace(own, is_dummy=True), is_last=True)
    critic.update(4)
    assert torch.equal(backend.value.grad, once)
    values_N = 2.0 * (own.packed.sources_N + 1)
    loss = float(((values_N - 1.0) ** 2).mean() / 2)
    assert backend.calls[0] == "zero_grad"
    assert backend.calls[1] == (pytest.approx(loss, rel=1e-5), False)
    assert backend.calls[2:] == [(0.0, True), "update 4"]
    metrics = critic.metrics()
    assert metrics["value_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["value_clip_fraction"] == 0.0, "away from the target nothing is clipped"
    assert {name: metrics[f"critic_{name}"] for name in ("grad_norm", "lr", "updates")} == {
        "grad_norm": 2.0, "lr": 0.1, "updates": 1.0
    }  # fmt: skip
    critic.begin(prepared)
    critic.backward(with_targets(own, 0.0, 1000.0), is_last=True)
    critic.update(5)
    assert critic.metrics()["value_clip_fraction"] == 1.0, "each has moved too far towards its target"
    assert critic.metrics()["critic_updates"] == 1.0, "of this step alone"


def test_values_are_before_each_sampled_token_and_after_the_last_of_each_sequence(samples: list[BatchSample]) -> None:
    backend: Any = PlayedBackend()
    critic = Critic(backend, CriticSettings(), Ranks.alone())
    batch = prepare_batch(samples[:3], 3, settings_of(micro_batch_tokens=10_000, mini_batches=1)).mini_batches[0][0]
    before_N, after_S = critic.values(batch)
    assert torch.equal(before_N, 2.0 * (batch.packed.sources_N + 1))
    assert after_S.tolist() == (2.0 * np.cumsum(batch.packed.lengths)).tolist()
    assert not before_N.requires_grad
    assert [critic.is_alone(step) for step in (0, 1)] == [True, False]


def test_gradients_left_from_elsewhere_do_not_count(folder: Path, tiny_model: Any, samples: list[BatchSample]) -> None:
    found = []
    for is_dirty in (False, True):
        step = made(folder, tiny_model(), settings_of())
        assert step.critic is not None
        models = step.policy.model, step.critic.backend.model
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3.0) if is_dirty else None
        step.run(step.prepare(samples, version=3))
        found.append([weights(model) for model in models])
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*found, strict=True))


# ---------------------------------------------------------------- checkpoints


def opened(prepared: Path, name: str, *, resume_from: Path | None = None, **settings: Any) -> Training:
    run_dir = prepared.parent / name
    keys = {
        "device": "cpu", "optimizer": {"lr": 1e-3}, "critic": {"optimizer": {"lr": 0.01}},
        "advantage": {"kind": "gae"}, "mini_batches": 2, **settings,
    }  # fmt: skip
    training = Training(
        ProcessSpec(
            role="trainer", name="trainer", run_id="t", run_dir=str(run_dir), hub_address="tcp://127.0.0.1:1",
            parent_pid=os.getpid(), seed=1, model=ModelSettings(path=str(prepared)), sampling=SamplingSettings(),
            staleness=StalenessSettings(), groups_per_step=4, group_size=4, num_steps=4,
            weight_dir=str(run_dir / "weights"), settings=keys, resume_from=str(resume_from) if resume_from else None,
        )
    )  # fmt: skip
    training.open()
    return training


def advance(training: Training, until: int, make_samples: Any) -> list[dict[str, float]]:
    metrics = []
    while training.version < until:
        step = training.version + 1
        metrics.append(training.run(training.prepare(make_samples(GROUPS, version=step, seed=step), step)))
    return metrics


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]


def test_resumed_run_computes_the_same_bits_of_policy_and_critic(folder: Path, make_samples: Any) -> None:
    through = opened(folder, "through")
    advance(through, 2, make_samples)
    half = through.save()().folder
    rows = advance(through, 4, make_samples)
    whole = through.save()().folder
    resumed = opened(folder, "resumed", resume_from=half)
    assert without_times(advance(resumed, 4, make_samples)) == without_times(rows)
    again = resumed.save()().folder
    for name in ("model.safetensors", "optimizer.safetensors", checkpoint.CRITIC):
        one, other = load_file(whole / name), load_file(again / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    kinds = {key.partition("/")[0] for key in load_file(whole / checkpoint.CRITIC)}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "step"}


def test_versions_and_exports_hold_the_policy_alone(folder: Path, make_samples: Any) -> None:
    training = opened(folder, "run")
    advance(training, 1, make_samples)
    written, saved, final = training.publish()(), training.save()(), training.export()
    policy = set(training.model.state_dict())
    _, payload = open_payload(written.path)
    assert set(payload) == policy
    assert set(load_file(final / "model.safetensors")) == policy
    assert set(stored_tensors(saved.folder)) == policy


def test_checkpoint_without_a_critic_is_refused_where_one_is_wanted(folder: Path, make_samples: Any) -> None:
    without = opened(folder, "without", critic=None, advantage={"kind": "grpo"})
    start = without.save()().folder
    advance(without, 1, make_samples)
    later = without.save()().folder
    assert opened(folder, "begins", resume_from=start).version == 0
    with pytest.raises(UserError, match="the checkpoint contains no critic"):
        opened(folder, "goes_on", resume_from=later)


def test_critic_of_another_model_is_a_damaged_checkpoint(folder: Path) -> None:
    model = load_critic(folder)
    own = {f"weight/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for change, message in (
        ({"weight/other": torch.zeros(1)}, "belongs to a different model: the tensor other is only in the file"),
        ({"weight/lm_head.weight": torch.zeros(2, 3)}, "cannot be read"),
    ):
        save_file({**own, **change}, folder / checkpoint.CRITIC)
        with pytest.raises(WeightError, match=message):
            load_critic_weights(folder, model)


def test_turns_with_rewards_and_nothing_given_between_them_are_turns_of_their_own(samples: list[BatchSample]) -> None:
    sample = max(samples, key=lambda one: one.trajectory.num_sampled)
    num = sample.trajectory.num_sampled
    turns = {"turn_ends_K": np.array([1, num], np.int32), "turn_rewards_K": np.array([0.5, 0.5], np.float32)}
    trajectory = msgspec.structs.replace(sample.trajectory, **turns)
    starts_N = BatchRewards.of([msgspec.structs.replace(sample, trajectory=trajectory)]).turn_starts_N
    assert starts_N.tolist() == [True, True, *[False] * (num - 2)]
