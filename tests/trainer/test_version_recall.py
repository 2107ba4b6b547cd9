"""Log-probs are those of the version that sampled each token, however a step is cut; weights are back afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.wire.messages import BatchSample
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import (
    AdapterSettings,
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
    TrainerSettings,
    WeightClip,
)
from trainer.data.batch import PreparedBatch
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.lora import add_adapter
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

SDPA = AttentionChoice("sdpa", "test")
GROUPS = (4, 2, 3, 4, 1)
BALANCED = LossSettings(weight=WeightClip(mode="off"), corrections=(CorrectionSettings(kind="balance_heuristic"),))


def trainer_of(model: PreTrainedModel, dtype: Any = "float32", ranks: Ranks | None = None, **changes: Any) -> TrainStep:
    keys: dict[str, Any] = {
        "micro_batch_tokens": 64, "optimizer": OptimizerSettings(lr=1e-2), "version_logprobs": {}, **changes
    }  # fmt: skip
    setup = Setup(TrainerSettings(**keys), temperature=0.9, num_steps=10, attention=SDPA, ranks=ranks or Ranks.alone())
    ready_model(model, setup)
    return TrainStep(TorchBackend(model, setup), setup, groups_per_step=8, version_dtype=dtype)


class Past:
    """A trainer that has taken steps, and a copy of the model at every version."""

    def __init__(self, model: PreTrainedModel, samples: Any, num_versions: int = 3, **changes: Any) -> None:
        self.trainer = trainer_of(model, **changes)
        self.models: list[PreTrainedModel] = []
        self.remember(model, 0)
        for version in range(1, num_versions):
            self.trainer.run(self.trainer.prepare(samples((3, 2), version=0, seed=version), version - 1))
            self.remember(model, version)

    def remember(self, model: PreTrainedModel, version: int) -> None:
        self.trainer.remember(version)
        self.models.append(copy.deepcopy(model))


def expected_of(model: PreTrainedModel, sample: BatchSample) -> np.ndarray:
    attach(model, SDPA)
    t = sample.trajectory
    packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
    with torch.no_grad():
        logprobs_N, _ = token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)
    return np.asarray(logprobs_N.numpy(), np.float64)


def versions_of(sample: BatchSample) -> np.ndarray:
    return np.asarray(sample.trajectory.versions_T[sample.trajectory.loss_mask_T])


def by_sample(prepared: PreparedBatch, name: str, num: int) -> list[np.ndarray]:
    """A field of `recalled`, of each sample's tokens."""
    found: list[np.ndarray] = [np.empty(0)] * num
    for mini_batch in prepared.mini_batches:
        for one in mini_batch:
            recalled = one.inputs.recalled
            assert recalled is not None
            values_N = getattr(recalled, name).numpy()
            for number, place in enumerate(one.places_S):
                found[place] = values_N[one.packed.sequence_N.numpy() == number]
    return found


def looked(trainer: TrainStep, samples: Sequence[BatchSample], version: int) -> PreparedBatch:
    assert trainer._recall is not None
    return trainer._recall.look(trainer.prepare(samples, version))


@pytest.mark.parametrize("tokens", [10_000, 64, 20])
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_every_token_has_the_log_prob_of_its_version(
    tiny_model: Callable[..., Any], make_samples: Any, tokens: int, mini_batches: int
) -> None:
    past = Past(tiny_model(), make_samples, micro_batch_tokens=tokens, mini_batches=mini_batches)
    samples = make_samples(GROUPS, version=2)
    prepared = looked(past.trainer, samples, 2)
    own, is_recalled, is_missing = (
        by_sample(prepared, name, len(samples)) for name in ("own_N", "is_recalled_N", "is_missing_N")
    )
    differences = []
    for place, sample in enumerate(samples):
        versions_N = versions_of(sample)
        assert (is_recalled[place] == (versions_N < 2)).all(), "the present version is the policy itself"
        assert not is_missing[place].any()
        all_VN = np.stack([expected_of(model, sample) for model in past.models])
        expected_N = all_VN[versions_N, np.arange(len(versions_N))]
        old_N = versions_N < 2
        np.testing.assert_allclose(own[place][old_N], expected_N[old_N], atol=2e-5)
        differences += np.abs(expected_N - all_VN[2])[old_N].tolist()
    assert np.max(differences) > 0.05, "versions differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_back_bit_for_bit(tiny_model: Callable[..., Any], make_samples: Any, dtype: str) -> None:
    past = Past(tiny_model(), make_samples, dtype=dtype)
    before = [parameter.detach().clone() for parameter in past.trainer.policy.model.parameters()]
    looked(past.trainer, make_samples(GROUPS, version=2), 2)
    after = past.trainer.policy.model.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_weights_are_back_after_an_error(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    past = Past(tiny_model(), make_samples)
    before = [parameter.detach().clone() for parameter in past.trainer.policy.model.parameters()]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    past.trainer.policy.logprobs = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        looked(past.trainer, make_samples(GROUPS, version=2), 2)
    after = past.trainer.policy.model.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_of_16_bit_versions_the_rounded_weights_count_also_of_the_present_one(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    past = Past(tiny_model(), make_samples, dtype="bfloat16")
    samples = make_samples(GROUPS, version=2)
    own = by_sample(looked(past.trainer, samples, 2), "own_N", len(samples))
    rounded = [copy.deepcopy(model) for model in past.models]
    with torch.no_grad():
        for parameter in (one for model in rounded for one in model.parameters()):
            parameter.copy_(parameter.to(torch.bfloat16))
    for place, sample in enumerate(samples):
        versions_N = versions_of(sample)
        all_VN = np.stack([expected_of(model, sample) for model in rounded])
        np.testing.assert_allclose(own[place], all_VN[versions_N, np.arange(len(versions_N))], atol=2e-5)


def test_of_an_adapter_only_the_adapter_is_kept(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    model = tiny_model()
    add_adapter(model, AdapterSettings(rank=2), seed=0)
    past = Past(model, make_samples, lora={"rank": 2})
    assert past.trainer._recall is not None
    assert all("lora_" in name for name in past.trainer._recall._past.newest())
    samples = make_samples(GROUPS, version=2)
    own = by_sample(looked(past.trainer, samples, 2), "own_N", len(samples))
    for place, sample in enumerate(samples):
        versions_N = versions_of(sample)
        all_VN = np.stack([expected_of(model, sample) for model in past.models])
        old_N = versions_N < 2
        np.testing.assert_allclose(own[place][old_N], all_VN[versions_N, np.arange(len(versions_N))][old_N], atol=2e-5)


def test_tokens_of_a_version_that_is_not_held_are_counted(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    past = Past(tiny_model(), make_samples, version_logprobs={"keep": 2})
    samples = make_samples(GROUPS, version=2)
    versions = np.concatenate([versions_of(sample) for sample in samples])
    metrics = past.trainer.run(past.trainer.prepare(samples, 2))
    assert metrics["version_missing_share"] == pytest.approx((versions == 0).mean())
    assert metrics["versions_held"] == 2.0
    assert metrics["versions_mb"] > 0


def test_the_balance_heuristic_gets_all_tokens_under_all_versions(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    past = Past(tiny_model(), make_samples, loss=BALANCED)
    samples = make_samples(GROUPS, version=2)
    prepared = looked(past.trainer, samples, 2)
    versions = np.concatenate([versions_of(sample) for sample in samples])
    shares = [float((versions == version).mean()) for version in range(3)]
    mixture = by_sample(prepared, "mixture_N", len(samples))
    for place, sample in enumerate(samples):
        terms = [shares[version] * np.exp(expected_of(past.models[version], sample)) for version in range(2)]
        np.testing.assert_allclose(np.exp(mixture[place]), sum(terms), rtol=1e-4)
    recalled = prepared.mini_batches[0][0].inputs.recalled
    assert recalled is not None
    assert recalled.start_share == pytest.approx(shares[2])


def test_a_step_with_exact_parts_is_the_same_however_it_is_cut(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    for loss in (LossSettings(proximal="version"), BALANCED):
        rows = []
        for tokens in (10_000, 20):
            past = Past(tiny_model(), make_samples, loss=loss)
            past.trainer.settings.__dict__["micro_batch_tokens"] = tokens
            metrics = past.trainer.run(past.trainer.prepare(make_samples(GROUPS, version=2), 2))
            rows.append({name: metrics[name] for name in ("loss", "grad_norm", "kl_mismatch", "kl_staleness")})
        assert rows[1] == pytest.approx(rows[0], rel=1e-4)


def test_passes_are_made_only_for_sequences_that_a_version_sampled(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    past = Past(tiny_model(), make_samples)
    seen: list[tuple[int, ...]] = []
    logprobs = past.trainer.policy.logprobs

    def noting(packed: PackedSequences, **options: Any) -> Any:
        seen.append(packed.lengths)
        return logprobs(packed, **options)

    past.trainer.policy.logprobs = noting  # type: ignore[method-assign]
    samples = make_samples(GROUPS, version=2)
    looked(past.trainer, samples, 2)
    needed = sum(len(set(versions_of(sample).tolist()) - {2}) for sample in samples)
    assert sum(map(len, seen)) == needed
    assert past.trainer._recall is not None
    assert past.trainer._recall.metrics()["version_passes"] == len(seen)


class TwoRanks(Ranks):
    """Both ranks of two, one after the other: the sums of the first round are those of both in the second."""

    def __init__(self, rank: int, seen: list[list[torch.Tensor]]) -> None:
        super().__init__(rank, 2, torch.device("cpu"))
        self.seen, self.own = seen, list[torch.Tensor]()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.own.append(values.clone())
        place = len(self.own) - 1
        others = [rank[place] for rank in self.seen if len(rank) > place]
        return torch.stack(others).sum(0) if len(others) == 2 else values + values


def test_ranks_make_equally_many_passes_and_use_the_versions_that_all_hold(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples = make_samples(GROUPS, version=2)
    past = Past(tiny_model(), make_samples)
    recall = past.trainer._recall
    assert recall is not None
    seen: list[list[torch.Tensor]] = []
    found = {}
    for _ in range(2):
        rounds = []
        for rank in range(2):
            ranks = TwoRanks(rank, seen)
            past.trainer._ranks = recall._ranks = ranks
            prepared = recall.look(past.trainer.prepare(samples, 2))
            found[rank] = (recall.metrics()["version_passes"], prepared)
            rounds.append(ranks.own)
        seen = rounds
    assert found[0][0] == found[1][0]
    for rank in range(2):
        for mini_batch in found[rank][1].mini_batches:
            for one in mini_batch:
                recalled = one.inputs.recalled
                assert recalled is not None
                for number, place in enumerate(one.places_S):
                    is_own_N = one.packed.sequence_N.numpy() == number
                    versions_N = versions_of(samples[place])
                    all_VN = np.stack([expected_of(model, samples[place]) for model in past.models])
                    old_N = versions_N < 2
                    np.testing.assert_allclose(
                        recalled.own_N.numpy()[is_own_N][old_N],
                        all_VN[versions_N, np.arange(len(versions_N))][old_N],
                        atol=2e-5,
                    )


def test_a_version_that_another_rank_let_go_is_not_used(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    past = Past(tiny_model(), make_samples)
    recall = past.trainer._recall
    assert recall is not None
    ranks = TwoRanks(0, [])
    ranks.sum = lambda values: values + torch.tensor([0.0, 1.0, 1.0]) if values.shape == (3,) else values  # type: ignore[method-assign]
    recall._ranks = ranks
    samples = make_samples(GROUPS, version=2)
    prepared = replace(past.trainer.prepare(samples, 2), tokens_of_version={0: 5, 1: 5, 2: 5})
    is_missing = by_sample(recall.look(prepared), "is_missing_N", len(samples))
    for place, sample in enumerate(samples):
        assert (is_missing[place] == (versions_of(sample) == 0)).all()
