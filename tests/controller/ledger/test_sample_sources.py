"""Sources of drawn and of trained groups: by fate, across a resume, and significant only where they are."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from real_ledger import apply_all

from controller.coordinator.effects import DropGroup, Effect, FilterGroup, RecordBatch, RecordGroup
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import Ledger
from controller.ledger.sample_sources import SampleSources, shift_z


def source_of(draw: int) -> str:
    return "data.mix.0" if draw % 3 == 0 else "data.train"


def batch(step: int, *groups: int, is_replay: bool = False) -> RecordBatch:
    members = tuple(BatchGroup(group_id=group, sample_indices=(), first_version=0) for group in groups)
    return RecordBatch(step=step, lineage="l0", groups=members, is_replay=is_replay)


STORY: list[Effect] = [
    *(RecordGroup(group_id=group, version=0, started=group, draw=group + 1) for group in range(1, 7)),
    batch(1, 1, 2),  # draws 2 and 3
    DropGroup(group_id=3, reason="stale", detail=""),
    FilterGroup(group_id=4, value=1.0),
    batch(1, 1, 2, is_replay=True),
]  # fmt: skip


def test_groups_are_counted_by_the_source_of_their_draw_and_their_fate() -> None:
    sources = SampleSources(source_of)
    for effect in STORY:
        sources.record(effect)
    assert sources.summary() == {
        "drawn": {"data.mix.0": 1, "data.train": 3}, "trained": {"data.mix.0": 1, "data.train": 1},
        "filtered": {"data.train": 1}, "lost": {"data.train": 1}, "shift_z": {"data.mix.0": 0.7, "data.train": -0.7},
    }  # fmt: skip
    assert SampleSources(source_of).summary() == {}


def test_a_resumed_run_continues_the_counts_of_its_ledger(tmp_path: Path) -> None:
    whole, resumed = SampleSources(source_of), SampleSources(source_of)
    with Ledger(tmp_path) as ledger:
        apply_all(ledger, [(effect, [0]) for effect in STORY[:-1]])
        resumed.restore(ledger.group_fates(), ledger.load().live)
    for effect in STORY:
        whole.record(effect)
    for sources in (whole, resumed):
        sources.record(batch(2, 5, 6))
    assert resumed.summary() == whole.summary()
    assert whole.summary()["trained"] == {"data.mix.0": 2, "data.train": 2}


@pytest.mark.parametrize("seed", range(20))
def test_losses_by_chance_are_no_shift_and_losses_of_one_source_are(seed: int) -> None:
    rng = random.Random(seed)
    trained, lost, chosen = Counter[str](), Counter[str](), Counter[str]()
    for draw in range(900):
        (lost if rng.random() < 0.2 else trained)[source_of(draw)] += 1
        chosen[source_of(draw)] += draw % 3 != 0 or rng.random() > 0.3
    assert abs(shift_z(trained, lost, "data.train")) < 4
    gone = Counter({"data.mix.0": 300 - chosen["data.mix.0"]})
    assert shift_z(chosen, gone, "data.mix.0") < -4
    assert shift_z(trained, Counter(), "data.train") == 0
