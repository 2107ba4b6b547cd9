"""The weight of each token in the loss of its update: how token losses are averaged.

The loss of a token is defined in losses/. Every denominator is a property of the whole step and is known before its
first micro-batch, so that no weight depends on how the step is split.

Shapes: B samples of the step, each with all its trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.config import LossSettings


def token_coefficients(
    sampled_lengths_B: Sequence[int], group_ids_B: Sequence[int], settings: LossSettings, *, num_updates: int = 1
) -> np.ndarray:
    """Return the weight of every token of each of a step's B samples, float64 [B].

    The loss of an update is the sum of weight * token loss over the tokens of its mini-batch. With L_i sampled tokens
    in sample i, G groups, T_g sampled tokens in group g, T in the step, and U updates, the weight of a token of sample
    i is

        token_mean     U / T                           all tokens have equal weight
        sequence_mean  U / (B * L_i)                   all samples have equal weight, and the tokens within a sample
        group_mean     U / (G * T_g)                   all groups have equal weight, and the tokens within a group
        constant       U / (B * constant_divisor)      equal weight, independent of T (Dr. GRPO, arXiv 2503.20783)

    A sample of several trajectories counts once: L_i is the sum over all of them, so that a token has the same weight
    as in a single trajectory of the sample.

    B, G, T and T_g are counts over the whole step, not over a mini-batch, a micro-batch or a rank. Mini-batches are
    split by tokens, so one with long answers has fewer samples; with counts of its own, each of them would weigh more.
    The factor U (`num_updates`) compensates for the samples that the update's mini-batch lacks: the mean of the
    step's U losses equals the loss of the step with one update, and the expected size of an update does not depend on
    U.
    """
    lengths_B = np.asarray(sampled_lengths_B, np.float64)
    assert len(lengths_B)
    assert (lengths_B > 0).all()
    assert len(group_ids_B) == len(lengths_B)
    assert num_updates > 0
    num = len(lengths_B)
    if settings.aggregation == "token_mean":
        return np.full(num, num_updates / lengths_B.sum())
    if settings.aggregation == "sequence_mean":
        return num_updates / (num * lengths_B)
    if settings.aggregation == "constant":
        return np.full(num, num_updates / (num * settings.constant_divisor))
    groups, group_B = np.unique(np.asarray(group_ids_B), return_inverse=True)
    tokens_G = np.bincount(group_B, weights=lengths_B)
    coefficient_B: np.ndarray = num_updates / (len(groups) * tokens_G[group_B])
    return coefficient_B
