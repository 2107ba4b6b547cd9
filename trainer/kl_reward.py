"""`kl_in: reward`: the divergence from the reference model taken off the rewards, before advantages are computed.

Owns: `advantages_with_kl`. Refuses: the passes that log-probs come from (step.py), estimators (objectives/kl.py).

The estimate is of the policy that sampled, whose log-prob was recorded: the reward belongs to the answer it gave
(REINFORCE++, arXiv 2501.03262). Members of a group may be on different ranks, so every rank gets all penalties.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from trainer.config import TrainerSettings
from trainer.data.batch import MicroBatch, PreparedBatch
from trainer.objectives.advantage import advantages, by_sample
from trainer.objectives.kl import KL_ESTIMATORS
from trainer.ranks import Ranks

Place = tuple[int, int]
"""Number of a mini-batch, and of a micro-batch in it."""


def advantages_with_kl(
    prepared: PreparedBatch, references: Mapping[Place, torch.Tensor], settings: TrainerSettings, ranks: Ranks
) -> PreparedBatch:
    """Compute the advantages again, of rewards minus penalties. Collective.

    references: log-probs under the reference model, of this rank's micro-batches by their places.
    """
    loss, rewards = settings.loss, prepared.rewards
    ends_B = np.cumsum(rewards.lengths_B)
    kl_N = torch.zeros(int(ends_B[-1]), dtype=torch.float64)
    for number, mini_batch in enumerate(prepared.mini_batches):
        for place, micro_batch in enumerate(mini_batch):
            if micro_batch.is_dummy:
                continue
            estimate = KL_ESTIMATORS[loss.kl_estimator]
            own_N = estimate(micro_batch.inputs.behaviour_N.double(), references[number, place].double().cpu())
            own = own_N.split([rewards.lengths_B[sample] for sample in micro_batch.samples_S])
            for sample, of_sample in zip(micro_batch.samples_S, own, strict=True):
                kl_N[ends_B[sample] - rewards.lengths_B[sample] : ends_B[sample]] = of_sample
    kl_N = ranks.sum(kl_N.to(ranks.device)).cpu()
    penalties_N = loss.kl_coef * kl_N.numpy()
    found = advantages(
        rewards.rewards_B, rewards.group_ids_B, rewards.lengths_B, settings.advantage, penalties_N=penalties_N,
        turns_B=rewards.turns_B,
    )  # fmt: skip
    of_samples = [torch.from_numpy(part) for part in by_sample(found, rewards.lengths_B)]
    mini_batches = tuple(
        tuple(_with_advantages(micro_batch, of_samples) for micro_batch in mini_batch)
        for mini_batch in prepared.mini_batches
    )
    metrics = {"advantage_abs_mean": float(np.abs(found).mean()), "kl_reward": float(kl_N.mean())}
    return replace(prepared, mini_batches=mini_batches, metrics={**prepared.metrics, **metrics})


def _with_advantages(micro_batch: MicroBatch, of_samples: list[torch.Tensor]) -> MicroBatch:
    if micro_batch.is_dummy:
        return micro_batch
    advantage_N = torch.cat([of_samples[sample] for sample in micro_batch.samples_S])
    return replace(micro_batch, inputs=replace(micro_batch.inputs, advantage_N=advantage_N))
