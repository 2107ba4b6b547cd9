"""Advantages that need a model's passes: `kl_in: reward`, the values of a critic, log-probs at the start of the step,
under the reference model and under a teacher.

The passes are in step.py, critic.py and gradient_norms.py, the estimators in objectives/kl.py, and the advantages in
objectives/.

Penalties are those of the policy that sampled, whose log-prob was recorded: the reward belongs to the answer it gave
(REINFORCE++, arXiv 2501.03262). Members of a group may be on different ranks, and standard deviations are those of the
batch, so every rank receives the penalties and values of all samples.

Shapes: Q trajectories of the batch; N sampled tokens: of all of them, or of a micro-batch; S sequences of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer.config import LossSettings, TrainerSettings
from trainer.data.batch import MicroBatch, PreparedBatch
from trainer.objectives.advantage import advantages_of, rewarded, spread, targets_of
from trainer.objectives.kl import KL_ESTIMATORS
from trainer.objectives.registry import advantage_of
from trainer.ranks import Ranks

Place = tuple[int, int]
"""Number of a mini-batch, and of a micro-batch in it."""
Values = tuple[torch.Tensor, torch.Tensor]
"""Values of a micro-batch: before each sampled token [N], after the last token of each sequence [S]."""


def step_advantages(
    prepared: PreparedBatch,
    settings: TrainerSettings,
    ranks: Ranks,
    *,
    references: Mapping[Place, torch.Tensor] | None = None,
    values: Mapping[Place, Values] | None = None,
    starts: Mapping[Place, torch.Tensor] | None = None,
    teachers: Mapping[Place, torch.Tensor] | None = None,
    square_norms_B: np.ndarray | None = None,
) -> PreparedBatch:
    """Compute the advantages again, and the targets of the critic. Collective.

    Args:
        prepared: this rank's part of the batch.
        settings: of the trainer.
        ranks: the trainer's ranks.
        references: log-probs under the reference model, of this rank's micro-batches by their places; with
            `kl_in: reward` the KL divergence from them is subtracted from the rewards.
        values: values of the critic, by place as well.
        starts: log-probs at the start of the step, by place as well.
        teachers: log-probs under a teacher that the ranks hold, by place as well. None: those of the samples, if any.
        square_norms_B: squared norms of the samples' gradients.
    """
    rewards, metrics, penalties_N = prepared.rewards, {}, None
    if references is not None and settings.loss.kl_coef > 0 and settings.loss.kl_in == "reward":
        kl_N = _of_all_tokens(prepared, lambda one, place: _kl(one, references[place], settings.loss), ranks)
        penalties_N = settings.loss.kl_coef * kl_N
        metrics["kl_reward"] = float(kl_N.mean())
    samples = rewarded(
        rewards.rewards_B, rewards.group_ids_B, rewards.lengths_B, settings.advantage, penalties_N, rewards.turns_B,
        rewards.trajectory_lengths_B,
    )  # fmt: skip
    if starts is not None:
        advantage, options = advantage_of(settings.advantage)
        if advantage.reads_tokens:
            samples = replace(
                samples,
                start_N=_logprobs(prepared, starts, ranks),
                reference_N=None if references is None else _logprobs(prepared, references, ranks),
                teacher_N=rewards.teacher_N if teachers is None else _logprobs(prepared, teachers, ranks),
            )
        else:
            drift_N = _of_all_tokens(prepared, lambda one, place: _drift(one, starts[place]), ranks)
            log_weights_B = np.add.reduceat(drift_N, np.cumsum([0, *rewards.lengths_B[:-1]]))
            samples = replace(samples, log_weights_B=log_weights_B, square_norms_B=square_norms_B)
        metrics |= advantage.metrics(samples, options)
    found = {}
    if values is not None:
        samples = replace(
            samples,
            values_N=_of_all_tokens(prepared, lambda _, place: values[place][0], ranks),
            end_values_Q=_of_all_trajectories(prepared, lambda place: values[place][1], ranks),
            turn_starts_N=rewards.turn_starts_N,
            is_cut_Q=rewards.is_cut_Q,
        )
        assert samples.values_N is not None
        found = {"values_N": samples.values_N.astype(np.float32), "target_N": targets_of(samples, settings.advantage)}
        metrics |= _value_metrics(samples.values_N, found["target_N"].astype(np.float64))
    found["advantage_N"] = advantages_of(samples, settings.advantage)
    metrics["advantage_abs_mean"] = float(np.abs(found["advantage_N"]).mean())
    of_all = {name: spread(numbers, rewards.trajectory_lengths_B) for name, numbers in found.items()}
    mini_batches = tuple(
        tuple(_with(micro_batch, of_all) for micro_batch in mini_batch) for mini_batch in prepared.mini_batches
    )
    return replace(prepared, mini_batches=mini_batches, metrics={**prepared.metrics, **metrics})


def _logprobs(prepared: PreparedBatch, found: Mapping[Place, torch.Tensor], ranks: Ranks) -> np.ndarray:
    return _of_all_tokens(prepared, lambda _, place: found[place], ranks)


def _drift(micro_batch: MicroBatch, start_N: torch.Tensor) -> torch.Tensor:
    return start_N.double().cpu() - micro_batch.inputs.behaviour_N.double()


def _kl(micro_batch: MicroBatch, reference_N: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    estimate = KL_ESTIMATORS[settings.kl_estimator]
    return estimate(micro_batch.inputs.behaviour_N.double(), reference_N.double().cpu())


def _of_all_tokens(
    prepared: PreparedBatch, of: Callable[[MicroBatch, Place], torch.Tensor], ranks: Ranks
) -> np.ndarray:
    """Values of micro-batches' sampled tokens, in the order of the trajectories, from all ranks; float64 [N]."""
    lengths_Q = prepared.rewards.lengths_Q
    ends_Q = np.cumsum(lengths_Q)
    all_N = torch.zeros(int(ends_Q[-1]), dtype=torch.float64)
    for micro_batch, place in _own(prepared):
        own = of(micro_batch, place).double().cpu().split([lengths_Q[one] for one in micro_batch.places_S])
        for one, numbers_N in zip(micro_batch.places_S, own, strict=True):
            all_N[ends_Q[one] - lengths_Q[one] : ends_Q[one]] = numbers_N
    return ranks.sum(all_N.to(ranks.device)).cpu().numpy()


def _of_all_trajectories(prepared: PreparedBatch, of: Callable[[Place], torch.Tensor], ranks: Ranks) -> np.ndarray:
    """One number of each trajectory, from all ranks; float64 [Q]."""
    all_Q = torch.zeros(len(prepared.rewards.lengths_Q), dtype=torch.float64)
    for micro_batch, place in _own(prepared):
        all_Q[list(micro_batch.places_S)] = of(place).double().cpu()
    return ranks.sum(all_Q.to(ranks.device)).cpu().numpy()


def _own(prepared: PreparedBatch) -> list[tuple[MicroBatch, Place]]:
    """This rank's micro-batches with their places, without those that it does not count."""
    return [
        (micro_batch, (number, place))
        for number, mini_batch in enumerate(prepared.mini_batches)
        for place, micro_batch in enumerate(mini_batch)
        if micro_batch.is_counted
    ]


def _value_metrics(values_N: np.ndarray, targets_N: np.ndarray) -> dict[str, float]:
    """Metrics of the values before the step. explained_variance: 1 - Var(R - V) / Var(R); 0 if targets are equal."""
    variance = float(targets_N.var())
    return {
        "value_mean": float(values_N.mean()),
        "value_target_mean": float(targets_N.mean()),
        "explained_variance": 1.0 - float((targets_N - values_N).var()) / variance if variance else 0.0,
    }


def _with(micro_batch: MicroBatch, of_all: Mapping[str, list[np.ndarray]]) -> MicroBatch:
    """Return the micro-batch with these values at its tokens; a dummy gets zeros."""
    if micro_batch.is_dummy:
        zeros_N = torch.zeros_like(micro_batch.inputs.advantage_N)
        nothing: dict[str, Any] = dict.fromkeys(of_all, zeros_N)
        return replace(micro_batch, inputs=replace(micro_batch.inputs, **nothing))
    own: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([numbers[one] for one in micro_batch.places_S]))
        for name, numbers in of_all.items()
    }
    return replace(micro_batch, inputs=replace(micro_batch.inputs, **own))
