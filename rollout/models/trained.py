"""Checks that a sample trains tokens of trained roles of the policy, and no others.

A workflow is the user's own code: it may put any token into a trajectory. Trained tokens must be an answer of the
policy in this sample in a trained role, with the same tokens, log-probs and versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import Segment, Trajectory
from rollout.model_settings import MODELS_KEY


def check_trained(trajectories: Sequence[Trajectory], sampled: Mapping[int, Segment], num_before: int) -> None:
    """Check the trajectories of one sample.

    Args:
        trajectories: all of them.
        sampled: answers of the policy in trained roles, by their numbers.
        num_before: answers of earlier leases have numbers below this one, and were checked there.

    Raises:
        UserError: other tokens are trained.
    """
    for trajectory in trajectories:
        for number, trained in _answers(trajectory):
            if 0 <= number < num_before:
                continue
            known = [sampled[number]] if number in sampled else [] if number >= 0 else list(sampled.values())
            if not any(_is_same(trained, one) for one in known):
                raise UserError(
                    "the sample marks tokens for training that were not sampled by a trained role of the policy",
                    where=MODELS_KEY,
                    remedy="add answers unchanged: use `transcript.sampled` for answers of trained roles, and "
                    "`transcript.given` for answers of other models",
                )


def _answers(trajectory: Trajectory) -> Iterator[tuple[int, Segment]]:
    """Number and tokens of each trained answer; number -1 if it is unknown."""
    mask_T = trajectory.loss_mask_T
    trained = Segment(trajectory.tokens_T[mask_T], trajectory.logprobs_T[mask_T], trajectory.versions_T[mask_T])
    if trajectory.answer_ends_A is None or trajectory.answer_ids_A is None:
        yield -1, trained
        return
    begin = 0
    for number, end in zip(trajectory.answer_ids_A.tolist(), trajectory.answer_ends_A.tolist(), strict=True):
        yield number, trained.head(end).tail(begin)
        begin = end


def _is_same(one: Segment, other: Segment) -> bool:
    pairs = ((one.tokens_R, other.tokens_R), (one.logprobs_R, other.logprobs_R), (one.versions_R, other.versions_R))
    return all(np.array_equal(left, right) for left, right in pairs)
