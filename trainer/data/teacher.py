"""Log-probs of a teacher that rollout workers computed (`trainer.teacher.model`), taken from the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_like.errors import UserError
from areal_like.wire.messages import BatchSample

KEY = "trainer.teacher.model"


def teacher_logprobs(samples: Sequence[BatchSample], model: str) -> np.ndarray:
    """Collect the log-prob of each sampled token under the teacher, in the order of the trajectories.

    Args:
        samples: the whole batch.
        model: name of the teacher, for messages.

    Returns:
        float64 [N], all finite.

    Raises:
        UserError: a sample has none, or one that is not finite.
    """
    return np.concatenate([_of_sample(sample, model) for sample in samples]).astype(np.float64)


def _of_sample(sample: BatchSample, model: str) -> np.ndarray:
    which = f"sample {sample.sample_index} of group {sample.group_id}"
    found = []
    for trajectory in sample.trajectories:
        if trajectory.teacher_logprobs_T is None:
            what = f"{which} has no log-probs of the teacher `{model}`, because it was generated without this setting"
            raise UserError(
                what, where=KEY, remedy="start a new run, whose samples will have the log-probs of the teacher"
            )
        found.append(trajectory.teacher_logprobs_T[trajectory.loss_mask_T])
    logprobs_N = np.concatenate(found)
    is_bad_N = ~np.isfinite(logprobs_N)
    if is_bad_N.any():
        place = int(is_bad_N.argmax())
        what = f"{which}: the log-prob of sampled token {place} under the teacher `{model}` is {logprobs_N[place]}"
        raise UserError(
            what,
            where=KEY,
            remedy="check the weights of the teacher model, and the dtype of this model in rollout.models",
        )
    return logprobs_N
