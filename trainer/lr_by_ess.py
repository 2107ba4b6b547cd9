"""Scales an update's learning rate by the effective sample size of its importance weights (VCPO, arXiv 2602.17616).

The factor is applied by the backend; token weights are in objectives/loss_sums.py.

The weight of a trajectory S is W = exp(sum over its sampled tokens of (c - b)): its probability under the policy before
the update divided by that under the policy that sampled it, without truncation.

Shapes: N sampled tokens of a micro-batch, S sequences of it, M trajectories of an update on all ranks, Q of the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from trainer.data.batch import MicroBatch
from trainer.ranks import Ranks
from trainer.staleness_config import LrByEssSettings


def effective_share(log_weights_M: np.ndarray) -> float:
    """Compute rho = (sum W)^2 / (M sum W^2) of W = exp(log_weights_M): from 1 / M to 1.

    0.0 if a weight is not a number, or all are 0.
    """
    largest = log_weights_M.max()
    if not np.isfinite(largest):
        return 0.0
    weights_M = np.exp(log_weights_M.astype(np.float64) - largest)  # a common factor does not change the share
    return float(weights_M.sum() ** 2 / (len(weights_M) * np.square(weights_M).sum()))


def lr_factor(share: float, settings: LrByEssSettings) -> float:
    """Compute min(1, share / reference)^power."""
    return float(min(1.0, share / settings.reference) ** settings.power)


class LrByEss:
    """Computes the factor of each update: `begin` a step; `add` the micro-batches of an update, then call `factor`, for
    each update; then `metrics`."""

    _found: np.ndarray
    """For each trajectory of the batch its log-weight, and 1 if it is in the current update; float64 [2, Q]."""
    _shares: list[float]
    _factors: list[float]

    def __init__(self, settings: LrByEssSettings, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks

    def begin(self, num_trajectories: int) -> None:
        """Start a step. num_trajectories: of the whole batch, Q."""
        self._found, self._shares, self._factors = np.zeros((2, num_trajectories)), [], []

    def add(self, micro_batch: MicroBatch, current_N: torch.Tensor) -> None:
        """Add the weights of a micro-batch, whose log-probs under the current policy are `current_N`."""
        if not micro_batch.is_counted:
            return
        packed = micro_batch.packed
        drift_N = current_N.detach().double() - micro_batch.inputs.behaviour_N.double()
        drift_S = drift_N.new_zeros(len(packed.lengths)).index_add(0, packed.sequence_N, drift_N)
        places = list(micro_batch.places_S)
        self._found[0, places] = drift_S.cpu().numpy()
        self._found[1, places] = 1.0

    def factor(self) -> float:
        """Return the factor of the update's learning rate: the same on every rank. Collective."""
        all_ranks = torch.from_numpy(self._found).to(self._ranks.device)
        log_weights_Q, count_Q = self._ranks.sum(all_ranks).cpu().numpy()
        self._found = np.zeros_like(self._found)
        self._shares.append(effective_share(log_weights_Q[count_Q > 0]))
        self._factors.append(lr_factor(self._shares[-1], self._settings))
        return self._factors[-1]

    def metrics(self) -> dict[str, float]:
        """Return means over the updates of the step; empty if there were none."""
        if not self._factors:
            return {}
        return {"ess_sequences": float(np.mean(self._shares)), "lr_factor": float(np.mean(self._factors))}
