"""Ledger entries for tests, with defaults."""

from __future__ import annotations

from real_ledger import segment_of, trajectory_of

from areal_like.verdict import Verdict
from controller.coordinator.effects import (
    RecordBatch,
    RecordCheckpoint,
    RecordGroup,
    RecordLineage,
    StoreFinished,
    StorePartial,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import LedgerEntry


def lineage(name: str = "l0", checkpoint: int = 0) -> LedgerEntry:
    return LedgerEntry(
        effect=RecordLineage(
            lineage=name,
            checkpoint_version=checkpoint,
            groups_per_step=1,
            group_size=1,
            max_staleness=None,
            on_stale="wait",
        )
    )


def admit(group_id: int, started: int | None = None) -> LedgerEntry:
    number = group_id + 1 if started is None else started
    return LedgerEntry(effect=RecordGroup(group_id=group_id, version=0, started=number))


def partial(group_id: int, start: int, versions: list[int], skip: int = 0) -> LedgerEntry:
    effect = StorePartial(
        lease_id=1, group_id=group_id, sample_index=0, start=start, skip=skip, num_tokens=len(versions) - skip
    )
    return LedgerEntry(effect=effect, segment=segment_of(versions, start - skip))


def finished(group_id: int, versions: list[int], value: float = 1.0) -> LedgerEntry:
    outcome = SampleOutcome(
        lease_id=1, group_id=group_id, sample_index=0, num_tokens=len(versions),
        first_version=versions[0], last_version=versions[-1], verdict_kind="scored", value=value,
    )  # fmt: skip
    effect = StoreFinished(purpose="train", outcome=outcome, value=value, is_kept=True)
    return LedgerEntry(
        effect=effect,
        trajectories=(trajectory_of(versions),),
        verdict=Verdict(kind="scored", value=value, components={"correct": value}),
        response_text="the answer",
        worker="rollout-0",
    )


def shipped(
    step: int, group_id: int, name: str = "l0", *, is_replay: bool = False, first_version: int = 0
) -> LedgerEntry:
    group = BatchGroup(group_id=group_id, sample_indices=(0,), first_version=first_version)
    return LedgerEntry(effect=RecordBatch(step=step, lineage=name, groups=(group,), is_replay=is_replay))


def checkpoint(version: int, name: str = "l0") -> LedgerEntry:
    return LedgerEntry(effect=RecordCheckpoint(version=version, lineage=name, path=f"c{version}"))
