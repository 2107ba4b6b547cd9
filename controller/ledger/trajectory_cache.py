"""Cache of trajectories of finished samples, so that a batch is not read back from the disk it was just written to.

The size is limited in bytes; whole groups are evicted, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from areal_like.trajectory import Trajectory


class TrajectoryCache:
    """A cache of at most `max_bytes` of payload."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._groups: dict[int, dict[int, tuple[Trajectory, ...]]] = {}

    def get(self, group_id: int, sample_index: int) -> tuple[Trajectory, ...] | None:
        """The sample's trajectories; None if they are not cached."""
        return self._groups.get(group_id, {}).get(sample_index)

    def add(self, group_id: int, sample_index: int, trajectories: tuple[Trajectory, ...]) -> None:
        """Add them; the oldest groups are evicted until all fits."""
        self._groups.setdefault(group_id, {})[sample_index] = trajectories
        self._num_bytes += sum(map(_size, trajectories))
        while self._num_bytes > self._max_bytes and self._groups:
            self.forget(next(iter(self._groups)))

    def forget(self, group_id: int) -> None:
        """Remove a group's trajectories."""
        samples = self._groups.pop(group_id, {}).values()
        self._num_bytes -= sum(_size(one) for trajectories in samples for one in trajectories)


def _size(trajectory: Trajectory) -> int:
    arrays: Iterable[Any] = (
        trajectory.tokens_T, trajectory.loss_mask_T, trajectory.logprobs_T, trajectory.versions_T,
    )  # fmt: skip
    others = (
        trajectory.routed_experts, trajectory.turn_ends_K, trajectory.turn_rewards_K, trajectory.answer_ends_A,
        trajectory.answer_ids_A, trajectory.teacher_logprobs_T,
    )  # fmt: skip
    return sum(array.nbytes for array in (*arrays, *others) if array is not None)
