"""Reads recorded batches and their samples from the ledger of a run that has ended, without changing it.

A running run reads its batches through ledger.py. Connections are opened by the caller.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from areal_like.errors import LedgerError
from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from controller.coordinator.snapshot import BatchGroup, BatchRecord
from controller.ledger.schema import read_batches
from controller.ledger.segment_store import Location, SegmentStore, unpack_sample


class SampleVersions(NamedTuple):
    """A recorded sample, and the first and last version that sampled its tokens; whether these are still stored."""

    group_id: int
    sample_index: int
    first_version: int
    last_version: int
    is_stored: bool


def samples_of_batch(
    groups: Sequence[BatchGroup],
    reused: Sequence[BatchGroup],
    rewards_of: Callable[[int], Mapping[int, float]],
    trajectories_of: Callable[[int, int], tuple[Trajectory, ...]],
) -> tuple[BatchSample, ...]:
    """Put the samples of a batch together, ordered by (group_id, sample_index).

    Args:
        groups: the batch's groups.
        reused: groups of earlier steps that it trains on as well.
        rewards_of: rewards of a group by sample index.
        trajectories_of: trajectories of a sample, the main one first.
    """
    samples: list[BatchSample] = []
    old = {group.group_id for group in reused}
    for group in sorted((*groups, *reused), key=lambda group: group.group_id):
        rewards = rewards_of(group.group_id)
        for index in sorted(group.sample_indices):
            trajectory, *others = trajectories_of(group.group_id, index)
            samples.append(
                BatchSample(
                    group_id=group.group_id,
                    sample_index=index,
                    trajectory=trajectory,
                    others=tuple(others),
                    reward=rewards[index],
                    is_reused=group.group_id in old,
                )
            )
    return tuple(samples)


class BatchReader:
    """Recorded batches of a run. Every method raises LedgerError if the ledger or a payload is damaged."""

    def __init__(self, db: sqlite3.Connection, segments: Path) -> None:
        """db: a connection to the ledger, of a schema that this version reads. segments: the folder of payloads."""
        self._db = db
        self._segments = SegmentStore(segments, segment_bytes=1, fsync=False) if segments.is_dir() else None

    def batches(self) -> dict[int, BatchRecord]:
        """The newest record of each step, by step."""
        try:
            return {batch.step: batch for batch in read_batches(self._db)}
        except (sqlite3.Error, ValueError) as error:
            raise LedgerError(
                f"the recorded batches cannot be read ({error}); run areal-like verify to see what is damaged"
            ) from error

    def starts(self) -> list[tuple[str, int]]:
        """Lineage and starting version of each start of the trainer, in order."""
        rows = self._read("SELECT lineage, checkpoint_version FROM lineages ORDER BY seq")
        return [(str(lineage), int(version)) for lineage, version in rows]

    def repeated_steps(self) -> set[int]:
        """Steps that more than one start of the trainer was given."""
        rows = self._read("SELECT step FROM batches GROUP BY step HAVING COUNT(DISTINCT lineage) > 1")
        return {int(step) for (step,) in rows}

    def num_purged(self, batch: BatchRecord) -> int:
        """Number of the batch's samples whose tokens are not stored any more."""
        count = 0
        for group in (*batch.groups, *batch.reused):
            marks = ",".join("?" * len(group.sample_indices))
            query = (
                f"SELECT COUNT(*) FROM samples WHERE group_id = ? AND file IS NOT NULL AND sample_index IN ({marks})"
            )
            ((found,),) = self._read(query, (group.group_id, *group.sample_indices))
            count += len(group.sample_indices) - int(found)
        return count

    def sample_versions(self, batch: BatchRecord) -> list[SampleVersions]:
        """The samples that the batch was the first to use, ordered by (group_id, sample_index)."""
        found = []
        for group in sorted(batch.groups, key=lambda group: group.group_id):
            query = (
                "SELECT sample_index, first_version, last_version, file IS NOT NULL FROM samples WHERE group_id = ? "
                "ORDER BY sample_index"
            )
            for index, first, last, is_stored in self._read(query, (group.group_id,)):
                if index in group.sample_indices:
                    found.append(SampleVersions(group.group_id, index, first, last, bool(is_stored)))
        return found

    def samples(self, batch: BatchRecord) -> tuple[BatchSample, ...]:
        """Payloads and rewards of a batch, as the trainer received them."""
        return samples_of_batch(batch.groups, batch.reused, self._rewards, self.trajectories)

    def close(self) -> None:
        """Close the ledger and its files."""
        if self._segments is not None:
            self._segments.close()
        self._db.close()

    def _rewards(self, group_id: int) -> dict[int, float]:
        return dict(self._read("SELECT sample_index, value FROM samples WHERE group_id = ?", (group_id,)))

    def trajectories(self, group_id: int, sample_index: int) -> tuple[Trajectory, ...]:
        """Trajectories of a sample, the main one first."""
        what = f"the tokens of sample {sample_index} of group {group_id}"
        query = "SELECT file, offset, size FROM samples WHERE group_id = ? AND sample_index = ?"
        rows = list(self._read(query, (group_id, sample_index)))
        if not rows or rows[0][0] is None or self._segments is None:
            raise LedgerError(f"{what} are no longer stored (see ledger.keep_mb)")
        try:
            return unpack_sample(self._segments.read(Location(*rows[0])))[0]
        except ValueError as error:
            raise LedgerError(f"{what} are damaged ({error}); run areal-like verify to see what is damaged") from error

    def _read(self, query: str, values: Iterable[object] = ()) -> list[tuple]:
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(
                f"the ledger cannot be read ({error}); run areal-like verify to see what is damaged"
            ) from error
