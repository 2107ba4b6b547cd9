"""The comparison of engines with their versions, on a policy whose log-probs are what its adapter says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import UserError
from areal_like.trajectory import Segment, Trajectory
from areal_like.wire.messages import BatchSample
from trainer.adapter_check import MAX_SEQUENCES, NEAR, SEEN_NATS, AdapterCheck
from trainer.config import TrainerSettings
from trainer.data.batch import PreparedBatch, prepare_batch
from trainer.host_copy import Part, whole_part
from trainer.model.lora import LoraLinear
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks

BASE = -8.0
"""Log-prob of every token without the adapter."""


class Policy:
    """Log-probs are BASE plus the one number of its adapter, rounded as the check asks for."""

    def __init__(self) -> None:
        module = torch.nn.Linear(1, 1, bias=False)
        module.__class__ = LoraLinear
        assert isinstance(module, LoraLinear)
        module.scale, module.is_adapted, module.rounds_to = 1.0, True, None
        self.model: Any = torch.nn.Sequential(module)
        self.layer = module
        self.adapter = torch.zeros(1)
        self.seen: list[PackedSequences] = []
        self.was_rounded: set[torch.dtype | None] = set()

    def parts(self) -> list[Part]:
        return [
            whole_part("weight/0.weight", self.layer.weight), whole_part("weight/0.lora_A", self.adapter),
            whole_part("exp_avg/0.lora_A", torch.full((1,), 99.0)),
        ]  # fmt: skip

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, None]:
        assert not with_entropy
        assert not torch.is_grad_enabled()
        self.seen.append(packed)
        self.was_rounded.add(self.layer.rounds_to)
        value = BASE + (float(self.adapter) if self.layer.is_adapted else 0.0)
        return torch.full((packed.num_predictions,), value), None


def sample(logprobs: list[float], versions: list[int], prompt: int = 3, group_id: int = 0) -> BatchSample:
    answer = Segment(
        np.arange(10, 10 + len(logprobs), dtype=np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32)
    )
    prompt_P = np.arange(3, 3 + prompt, dtype=np.int32)
    return BatchSample(
        group_id=group_id, sample_index=0, trajectory=Trajectory.from_prompt(prompt_P, answer, "stop"), reward=1.0
    )


def batch_of(*samples: BatchSample, version: int) -> PreparedBatch:
    """In one micro-batch, for the step after `version`."""
    return prepare_batch(samples, version, TrainerSettings(micro_batch_tokens=10_000))


def check_of(policy: Policy, adapters: list[float], ranks: Ranks | None = None, **changes: Any) -> AdapterCheck:
    """It remembers versions 0, 1, ... whose adapters are these."""
    made: Any = policy
    check = AdapterCheck(made, ranks or Ranks.alone(), **{"num_versions": 4, "dtype": "float32", **changes})
    for version, value in enumerate(adapters):
        policy.adapter.fill_(value)
        check.remember(version)
    return check


def test_error_and_effect_are_root_mean_squares_over_tokens() -> None:
    policy = Policy()
    check = check_of(policy, [0.0, 2.0])
    metrics = check.look(batch_of(sample([-6.5, -6.5, -6.0], [1, 1, 1]), sample([-7.0], [1]), version=1))
    assert metrics["adapter_error_nats"] == pytest.approx(np.sqrt((0.25 + 0.25 + 0.0 + 1.0) / 4))
    assert metrics["adapter_effect_nats"] == 2.0
    assert set(metrics) == {"adapter_error_nats", "adapter_effect_nats"}
    assert float(policy.adapter) == 2.0


def test_an_engine_near_another_policy_is_named_with_both_distances() -> None:
    check = check_of(Policy(), [0.0, 2.0])
    with pytest.raises(UserError) as raised:
        check.look(batch_of(sample([-7.9, -7.9], [1, 1]), version=1))
    assert str(raised.value) == (
        "rollout.engine: the engine samples with the base model instead of version 1: the log-probs of its answers "
        "differ by 1.9 nats from version 1, but by 0.1 nats from the base model (root mean square over tokens)"
        " -> use an engine that loads the published versions, or set trainer.lora: null"
    )


def test_an_engine_that_is_not_near_another_policy_ends_nothing() -> None:
    check = check_of(Policy(), [0.0, 2.0])
    at_the_bound = BASE + 2.0 * NEAR
    assert check.look(batch_of(sample([at_the_bound], [1]), version=1))["adapter_error_nats"] == 1.5
    with pytest.raises(UserError, match="samples with the base"):
        check.look(batch_of(sample([at_the_bound - 0.01], [1]), version=1))


@pytest.mark.parametrize(("effect", "ends"), [(SEEN_NATS / 2, False), (SEEN_NATS * 2, True)])
def test_nothing_is_said_of_an_adapter_that_makes_no_visible_difference(effect: float, ends: bool) -> None:
    check = check_of(Policy(), [effect])
    batch = batch_of(sample([BASE, BASE], [0, 0]), version=0)
    if ends:
        with pytest.raises(UserError, match="samples with the base"):
            check.look(batch)
    else:
        assert check.look(batch)["adapter_effect_nats"] == pytest.approx(effect, rel=0.01)


def test_older_versions_are_compared_in_turns_and_newer_ones_never() -> None:
    adapters = [1.0, 2.0, 3.0, 4.0]
    found = {}
    for step in (3, 4):
        for stuck in (0, 1, 3):
            check = check_of(Policy(), adapters)
            batch = batch_of(sample([BASE + adapters[stuck]], [2]), version=step - 1)
            try:
                check.look(batch)
                found[step, stuck] = ""
            except UserError as error:
                found[step, stuck] = error.what.split(":")[0]
    assert found == {
        (3, 0): "", (3, 1): "the engine samples with version 1 instead of version 2", (3, 3): "",
        (4, 0): "the engine samples with version 0 instead of version 2", (4, 1): "", (4, 3): "",
    }  # fmt: skip


def test_only_the_newest_versions_are_kept_and_answers_of_others_are_not_looked_at() -> None:
    policy = Policy()
    check = check_of(policy, [1.0, 2.0, 3.0], num_versions=2)
    for version in (0, 3):
        policy.seen.clear()
        assert check.look(batch_of(sample([BASE], [version]), version=3)) == {}
        assert policy.seen == []
    for version, value in ((1, 2.0), (2, 3.0)):
        metrics = check.look(batch_of(sample([BASE + value], [version]), version=3))
        assert metrics == {"adapter_error_nats": 0.0, "adapter_effect_nats": value}


def test_before_any_version_nothing_is_looked_at() -> None:
    assert check_of(Policy(), []).look(batch_of(sample([BASE], [0]), version=0)) == {}


def test_the_version_that_most_answers_begin_with_is_looked_at() -> None:
    policy = Policy()
    check = check_of(policy, [1.0, 2.0, 4.0])
    answers = [sample([BASE + 2.0] * 2, [1, 1], prompt=3 + number) for number in range(2)]
    late = sample([BASE - 5.0] * 5, [2] * 5)
    metrics = check.look(batch_of(answers[0], late, answers[1], version=2))
    assert metrics == {"adapter_error_nats": 0.0, "adapter_effect_nats": 2.0}
    assert [packed.lengths for packed in policy.seen] == [(5, 6)] * 3


def test_the_present_adapter_is_back_after_an_error_and_weights_change_behind_the_fence() -> None:
    policy, fences = Policy(), list[float]()
    check = check_of(policy, [1.0, 2.0, 4.0], fence=lambda: fences.append(float(policy.adapter)))
    check.look(batch_of(sample([BASE + 2.0], [1]), version=2))
    assert float(policy.adapter) == 4.0
    assert fences == [4.0, 2.0, 1.0], "before each change: to version 1, to the older one, back"
    right = policy.logprobs

    def broken(packed: PackedSequences, *, with_entropy: bool) -> Any:
        if policy.layer.is_adapted:
            raise RuntimeError
        return right(packed, with_entropy=with_entropy)

    policy.logprobs = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        check.look(batch_of(sample([BASE + 2.0], [1]), version=2))
    assert float(policy.adapter) == 4.0


def test_what_is_remembered_does_not_change_with_training() -> None:
    policy = Policy()
    check = check_of(policy, [1.0])
    policy.adapter.fill_(5.0)
    check.remember(1)
    metrics = check.look(batch_of(sample([BASE + 1.0], [0]), version=1))
    assert metrics == {"adapter_error_nats": 0.0, "adapter_effect_nats": 1.0}


@pytest.mark.parametrize(("dtype", "kind"), [("float32", None), ("bfloat16", torch.bfloat16)])
def test_targets_are_rounded_as_versions_are(dtype: str, kind: torch.dtype | None) -> None:
    policy = Policy()
    check_of(policy, [1.0, 2.0], dtype=dtype).look(batch_of(sample([BASE + 2.0], [1]), version=1))
    assert policy.was_rounded == {kind}
    assert policy.layer.rounds_to is None
    assert policy.layer.is_adapted


def test_some_sequences_are_looked_at_with_their_own_tokens_and_masks() -> None:
    policy = Policy()
    check = check_of(policy, [1.0, 2.0])
    others = [sample([BASE] * (1 + number), [0] * (1 + number), prompt=2) for number in range(3)]
    answers = [sample([BASE + 2.0] * (2 + number), [1] * (2 + number), prompt=4) for number in range(6)]
    mixed = [one for pair in zip(answers, [*others, *others], strict=True) for one in pair][:11]
    check.look(batch_of(*mixed, version=1))
    for packed in policy.seen:
        assert packed.lengths == tuple(6 + number for number in range(MAX_SEQUENCES))
        expected = [one.trajectory.tokens_T for one in answers[:MAX_SEQUENCES]]
        assert packed.tokens_T.tolist() == np.concatenate(expected).tolist()
        assert packed.targets_N.tolist() == [
            token for one in answers[:MAX_SEQUENCES] for token in one.trajectory.tokens_T[4:].tolist()
        ]


def test_tokens_after_the_first_change_of_version_do_not_count() -> None:
    check = check_of(Policy(), [0.0, 2.0, 3.0])
    answer = sample([-6.0, -6.5, -1.0, -1.0], [1, 1, 2, 2])
    assert check.look(batch_of(answer, version=2))["adapter_error_nats"] == pytest.approx(np.sqrt(0.25 / 2))


class TwoRanks(Ranks):
    """The first of two: what the other adds is given."""

    def __init__(self, others: list[list[float]]) -> None:
        alone = Ranks.alone()
        vars(self).update(vars(alone))
        self.others: Iterator[list[float]] = iter(others)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tensor(next(self.others), dtype=values.dtype)


def dummy(batch: PreparedBatch) -> PreparedBatch:
    """The same whose micro-batch only keeps the other rank company."""
    return replace(batch, mini_batches=((replace(batch.mini_batches[0][0], is_dummy=True),),))


@pytest.mark.parametrize("make", [lambda batch: batch, dummy])
def test_a_rank_without_such_answers_computes_along_and_adds_nothing(
    make: Callable[[PreparedBatch], PreparedBatch],
) -> None:
    policy = Policy()
    check = check_of(policy, [0.0, 2.0], TwoRanks([[0.0, 3.0], [6.0, 0.5, 24.0, 1.0, 24.0, 6.0]]))
    own = sample([-1.0, -1.0], [1, 1] if make is dummy else [0, 0])
    with pytest.raises(UserError, match=r"differ by 1 nats from version \d, but by 0\.29 nats from the base model"):
        check.look(make(batch_of(own, version=1)))
    assert len(policy.seen) == 3
