"""Records which model sampled which tokens of a trajectory, if a workflow calls several models.

Which models are trained is in rollout/model_settings.py.

Shape legend: T tokens of a trajectory, R tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

MAX_NAME_CHARS = 64


class TokenSource(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start` to `end` - 1 were sampled by this version of the model of this name.

    version: the policy's version for a role or a copy of the policy; 0 for a frozen model.
    """

    model: str
    version: int
    start: int
    end: int


def sources_of(model: str, versions_R: np.ndarray, start: int) -> list[TokenSource]:
    """Name the source of each token of an answer that begins at `start`: one entry for each run of equal versions.

    Example:
        >>> [one.end for one in sources_of("judge", np.array([3, 3, 4], np.int32), 10)]
        [12, 13]
    """
    if not len(versions_R):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(versions_R)) + 1).tolist(), len(versions_R)]
    return [TokenSource(model, int(versions_R[begin]), start + begin, start + end) for begin, end in pairwise(cuts)]


def check_sources(sources: Sequence[TokenSource], loss_mask_T: np.ndarray, versions_T: np.ndarray) -> None:
    """Check that sources follow each other within the trajectory and agree with the versions of trained tokens.

    Raises:
        ValueError: otherwise.
    """
    before = 0
    for one in sources:
        if not before <= one.start < one.end <= len(loss_mask_T):
            raise ValueError(f"sources must be non-empty, in order and within {len(loss_mask_T)} tokens, got {one}")
        if not 0 < len(one.model) <= MAX_NAME_CHARS or one.version < 0:
            raise ValueError(
                f"a source needs a model name of 1 to {MAX_NAME_CHARS} characters and a version of at least 0, "
                f"got {one}"
            )
        part = slice(one.start, one.end)
        if bool((versions_T[part][loss_mask_T[part]] != one.version).any()):
            raise ValueError(f"where loss_mask_T is True, versions_T must equal the version of the source, got {one}")
        before = one.end


def trained_models(sources: Iterable[TokenSource], loss_mask_T: np.ndarray) -> set[str]:
    """Names of the models of which a trajectory trains tokens."""
    return {one.model for one in sources if bool(loss_mask_T[one.start : one.end].any())}
