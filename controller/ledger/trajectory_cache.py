"""Trajectories of finished samples in memory, so that a batch is not read back from the disk it was just written to.

Owns: the bound on bytes; whole groups leave, the earliest first. Refuses: reading what is not here (ledger.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from areal_like.trajectory import Trajectory


class TrajectoryCache:
    """Holds at most `max_bytes` of payload."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._groups: dict[int, dict[int, Trajectory]] = {}

    def get(self, group_id: int, sample_index: int) -> Trajectory | None:
        """The sample's trajectory; None where it is not held."""
        return self._groups.get(group_id, {}).get(sample_index)

    def add(self, group_id: int, sample_index: int, trajectory: Trajectory) -> None:
        """Hold it; the earliest groups leave until all fits."""
        self._groups.setdefault(group_id, {})[sample_index] = trajectory
        self._num_bytes += _size(trajectory)
        while self._num_bytes > self._max_bytes and self._groups:
            self.forget(next(iter(self._groups)))

    def forget(self, group_id: int) -> None:
        """Drop a group's trajectories."""
        self._num_bytes -= sum(map(_size, self._groups.pop(group_id, {}).values()))


def _size(trajectory: Trajectory) -> int:
    arrays: Iterable[Any] = (
        trajectory.tokens_T, trajectory.loss_mask_T, trajectory.logprobs_T, trajectory.versions_T,
    )  # fmt: skip
    others = (trajectory.routed_experts, trajectory.turn_ends_K, trajectory.turn_rewards_K)
    return sum(array.nbytes for array in (*arrays, *others) if array is not None)
