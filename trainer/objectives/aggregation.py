"""How much each token weighs in its update's loss: who is averaged with whom.

Owns: `token_coefficients`. Refuses: what a token's loss is. Every denominator is a property of the whole step and is
known before its first micro-batch, so that no weight depends on how the step is cut.

Shapes: B samples of the step, each with all its trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.config import LossSettings


def token_coefficients(
    sampled_lengths_B: Sequence[int], group_ids_B: Sequence[int], settings: LossSettings, *, num_updates: int = 1
) -> np.ndarray:
    """Weight of every token of each of a step's B samples, float64 [B].

    The loss of an update is the sum of weight * token loss over the tokens of its mini-batch. With L_i sampled tokens
    in sample i, G groups, T_g sampled tokens in group g, T in the step, and U updates, a token of sample i weighs

        token_mean     U / T                           every token alike
        sequence_mean  U / (B * L_i)                   every sample alike, and the tokens in it
        group_mean     U / (G * T_g)                   every group alike, and the tokens in it
        constant       U / (B * constant_divisor)      every token alike; T plays no part (Dr. GRPO, arXiv 2503.20783)

    A sample of several trajectories counts once: L_i is of all of them, so that a token weighs what it would in a
    single trajectory of the sample, whichever of them it is in.

    B, G, T and T_g are counts over the whole step, never over a mini-batch, a micro-batch or a rank. Mini-batches are
    cut to equal tokens, so one of long answers has fewer samples: its own counts would weigh each of them more.
    The factor U (`num_updates`) makes up for the samples that the update's mini-batch lacks: the mean of the
    step's U losses is the loss the step has with one update, and the expected size of an update does not depend on U.
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
