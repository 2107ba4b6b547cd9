"""Feeds a real Ledger from the virtual cluster: the list of versions becomes arrays."""

from __future__ import annotations

import numpy as np

from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from controller.coordinator.effects import Effect, StoreFinished, StorePartial
from controller.ledger.ledger import Ledger, LedgerEntry


def segment_of(versions: list[int], start: int = 0) -> Segment:
    """Token ids count up from `start`, so that order and holes can be seen."""
    count = len(versions)
    return Segment(
        np.arange(start, start + count, dtype=np.int32),
        np.full(count, -0.5, np.float32),
        np.asarray(versions, np.int32),
    )


def trajectory_of(versions: list[int], prompt: int = 3) -> Trajectory:
    return Trajectory.from_prompt(np.arange(prompt, dtype=np.int32), segment_of(versions), "stop")


def entry_of(effect: Effect, versions: list[int] | None) -> LedgerEntry:
    match effect:
        case StorePartial():
            assert versions is not None
            return LedgerEntry(effect=effect, segment=segment_of(versions, effect.start - effect.skip))
        case StoreFinished() if effect.purpose == "train":
            assert versions is not None
            kind = effect.outcome.verdict_kind
            is_scored = kind == "scored"
            verdict = Verdict(kind=kind, value=effect.value if is_scored else None)
            return LedgerEntry(
                effect=effect, trajectories=(trajectory_of(versions),), verdict=verdict, worker="rollout-0"
            )
    return LedgerEntry(effect=effect)


def apply_all(ledger: Ledger, entries: list[tuple[Effect, list[int] | None]]) -> None:
    ledger.apply([entry_of(effect, versions) for effect, versions in entries])
