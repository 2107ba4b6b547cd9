"""Log-probs of a teacher for the sampled tokens of a finished sample (`trainer.teacher.model`).

The pool asks for them once the workflow has returned; the pass is in rollout/engine/frozen.py, their use in
trainer/objectives/advantages/distillation.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from areal_like.trajectory import Trajectory
from rollout.models.port import CalledModel


async def with_teacher_logprobs(
    trajectories: Sequence[Trajectory], teacher: CalledModel, temperature: float
) -> tuple[Trajectory, ...]:
    """Return the trajectories of one sample with `teacher_logprobs_T`, each from one pass over it.

    Args:
        trajectories: all of the sample.
        teacher: a model with separate weights.
        temperature: of the sampling; logits are divided by it, as the trainer divides the policy's.

    Returns:
        The trajectories in the same order.

    Raises:
        UserError: a token outside the teacher's vocabulary, or more tokens than its context.
        EngineError: its engine failed; the worker then exits.
        DeadlineExceeded: it has no weights yet (a copy of the policy).
    """
    return tuple([await _one(trajectory, teacher, temperature) for trajectory in trajectories])


async def _one(trajectory: Trajectory, teacher: CalledModel, temperature: float) -> Trajectory:
    """The pass begins at the first sampled token; log-probs of given tokens after it are not kept."""
    mask_T, tokens_T = trajectory.loss_mask_T, trajectory.tokens_T
    start = int(mask_T.argmax())
    found = await teacher.logprobs(tokens_T[:start], tokens_T[start:], temperature=temperature)
    logprobs_T = np.zeros(len(trajectory), np.float32)
    logprobs_T[start:] = np.where(mask_T[start:], found.logprobs_R, np.float32(0.0))
    return msgspec.structs.replace(trajectory, teacher_logprobs_T=logprobs_T)
