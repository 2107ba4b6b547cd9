"""Online DPO: preference pairs among the samples of a group, judged by their rewards (OAIF, arXiv 2402.04792).

For a pair with the higher reward w and the lower one l, and h = log-prob at the start of the step minus that under the
reference model, each summed over the sampled tokens:

    m = h_w - h_l       loss = -log sigmoid(beta m)   (DPO, 2305.18290)   or   (m - 1 / (2 beta))^2   (IPO, 2310.12036)

The loss of a group is the mean over its pairs. A of a sample is minus the derivative of that loss by the sample's
log-prob, times the samples of the group. With `aggregation: constant` and `constant_divisor: 1` the gradient of the
step is then that of the mean loss over its groups. The loss is defined for samples of any policy: it needs no
importance weight. A group of equal rewards has no pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Advantage, RewardedSamples


class Options(Settings):
    """Which pairs, and their loss."""

    beta: float = Field(0.1, gt=0)
    """How strongly the policy is held near the reference model."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair."""
    pairs: Literal["all", "best_worst"] = "all"
    """`all`: every two samples of unequal rewards; `best_worst`: one of the highest and one of the lowest reward."""


def compute(samples: RewardedSamples, options: Options) -> np.ndarray:
    """Compute one advantage per sample."""
    result_B = np.zeros(len(samples.rewards_B))
    for members, chosen, rejected, margins in _pairs(samples, options):
        slopes = _slope(margins, options) * len(members) / len(chosen)
        np.add.at(result_B, members[chosen], slopes)
        np.add.at(result_B, members[rejected], -slopes)
    return result_B


def metrics(samples: RewardedSamples, options: Options) -> dict[str, float]:
    """dpo_pairs: number of pairs; dpo_accuracy: share of them with a positive margin; dpo_margin: mean margin, nats."""
    margins = np.concatenate([margins for *_, margins in _pairs(samples, options)] or [np.zeros(0)])
    if not len(margins):
        return {"dpo_pairs": 0.0}
    return {
        "dpo_pairs": float(len(margins)),
        "dpo_accuracy": float((margins > 0).mean()),
        "dpo_margin": float(margins.mean()),
    }


def _pairs(
    samples: RewardedSamples, options: Options
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """For each group with a pair: its samples; of each pair the places of both in it, and the margin."""
    assert samples.start_N is not None
    assert samples.reference_N is not None
    firsts_B = np.cumsum([0, *samples.lengths_B[:-1]])
    gain_B = np.add.reduceat(samples.start_N - samples.reference_N, firsts_B)
    for members in samples.groups():
        chosen, rejected = pairs_of(samples.rewards_B[members], options.pairs)
        if len(chosen):
            yield members, chosen, rejected, gain_B[members[chosen]] - gain_B[members[rejected]]


def pairs_of(rewards: np.ndarray, kind: Literal["all", "best_worst"]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the chosen and the rejected sample of each pair; both empty where all rewards are equal."""
    if kind == "best_worst":
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        return (np.array([best]), np.array([worst])) if rewards[best] > rewards[worst] else (_NONE, _NONE)
    chosen, rejected = np.nonzero(rewards[:, None] > rewards[None, :])
    return chosen, rejected


_NONE = np.zeros(0, np.int64)


def _slope(margin: np.ndarray, options: Options) -> np.ndarray:
    """Minus the derivative of a pair's loss by its margin."""
    if options.loss == "ipo":
        return 2.0 * (0.5 / options.beta - margin)
    return options.beta / (1.0 + np.exp(np.clip(options.beta * margin, -500, 500)))


ADVANTAGE = Advantage(
    name="online_dpo", compute=compute, options=Options, needs_starts=True, needs_reference=True,
    metrics=metrics, is_for_any_policy=True, single_sample="a pair requires two samples",
)  # fmt: skip
