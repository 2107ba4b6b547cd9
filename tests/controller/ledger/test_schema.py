"""Reading the ledger back: what a new life of the run starts from, against facts written by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ledger_entries import admit, checkpoint, finished, lineage, partial, shipped

from controller.coordinator.effects import DropGroup, FilterGroup, RecordEval, RecordGroup
from controller.coordinator.snapshot import (
    BatchGroup,
    BatchRecord,
    CheckpointRecord,
    GroupRecord,
    LedgerState,
    SampleRecord,
)
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.ledger.schema import decode_groups, encode_groups


def evaluated(version: int) -> LedgerEntry:
    return LedgerEntry(effect=RecordEval(version=version, lineage="l0", kind="periodic", values=(1.0,)))


def dropped(group_id: int, reason: str) -> LedgerEntry:
    return LedgerEntry(effect=DropGroup(group_id=group_id, reason=reason))


def of_sample(entry: LedgerEntry, sample_index: int) -> LedgerEntry:
    """The same fact of another sample of its group."""
    effect = entry.effect
    if hasattr(effect, "outcome"):
        outcome = msgspec.structs.replace(effect.outcome, sample_index=sample_index)
        return msgspec.structs.replace(entry, effect=msgspec.structs.replace(effect, outcome=outcome))
    return msgspec.structs.replace(entry, effect=msgspec.structs.replace(effect, sample_index=sample_index))


def read(folder: Path, *entries: LedgerEntry) -> LedgerState:
    with Ledger(folder) as ledger:
        ledger.apply([lineage(), *entries])
    with Ledger(folder) as ledger:
        return ledger.load()


def record_of(step: int, name: str, group_id: int) -> BatchRecord:
    group = BatchGroup(group_id=group_id, sample_indices=(0,), first_version=0)
    return BatchRecord(step=step, lineage=name, groups=(group,))


def test_a_new_ledger_remembers_nothing(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        assert ledger.load() == LedgerState(
            num_lineages=0, num_drawn=0, next_draw=0, num_filtered=0, dropped={}, live=(), batches=(), checkpoints=(),
            evals=(),
        )  # fmt: skip


def test_groups_are_counted_by_fate_and_reason(tmp_path: Path) -> None:
    state = read(
        tmp_path,
        *(admit(number) for number in range(6)),
        finished(0, [0]), finished(1, [0]), shipped(1, 0),
        LedgerEntry(effect=FilterGroup(group_id=1, value=1.0)),
        dropped(2, "timeout"), dropped(3, "stale"), dropped(4, "timeout"),
    )  # fmt: skip
    assert (state.num_drawn, state.num_filtered, state.dropped) == (6, 1, {"stale": 1, "timeout": 2})
    assert list(state.dropped) == ["stale", "timeout"], "in one order in every life"
    assert [group.group_id for group in state.live] == [5]


def test_a_live_group_has_its_unfinished_and_its_finished_samples_and_no_others(tmp_path: Path) -> None:
    late = LedgerEntry(effect=RecordGroup(group_id=1, version=3, started=2))
    state = read(
        tmp_path, admit(0), late,
        of_sample(partial(1, 0, [3, 3]), 2), of_sample(partial(1, 2, [3, 4, 5]), 2), of_sample(partial(1, 5, [6]), 2),
        of_sample(finished(1, [4, 4, 7], value=0.25), 0), of_sample(partial(1, 0, [3]), 3),
        of_sample(finished(1, [3, 3]), 3),
    )  # fmt: skip
    assert state.live == (
        GroupRecord(group_id=0, version=0, draw=0, samples=()),
        GroupRecord(
            group_id=1, version=3, draw=1,
            samples=(
                SampleRecord(
                    sample_index=0, num_tokens=3, first_version=4, last_version=7, is_finished=True, is_kept=True,
                    value=0.25,
                ),
                SampleRecord(sample_index=2, num_tokens=6, first_version=3, last_version=6),
                SampleRecord(
                    sample_index=3, num_tokens=2, first_version=3, last_version=3, is_finished=True, is_kept=True,
                    value=1.0,
                ),
            ),
        ),
    )  # fmt: skip


def test_a_sample_without_a_value_is_finished_and_not_kept(tmp_path: Path) -> None:
    entry = finished(0, [0])
    effect = msgspec.structs.replace(entry.effect, value=None, is_kept=False)
    state = read(tmp_path, admit(0), msgspec.structs.replace(entry, effect=effect))
    (sample,) = state.live[0].samples
    assert (sample.is_finished, sample.is_kept, sample.value) == (True, False, None)
    assert isinstance(sample.is_kept, bool)


def test_samples_of_one_group_are_never_those_of_another(tmp_path: Path) -> None:
    state = read(
        tmp_path, admit(0), admit(1), admit(2), partial(0, 0, [0]), partial(2, 0, [0, 0]), finished(1, [0, 0, 0]),
        dropped(2, "timeout"),
    )  # fmt: skip
    assert [(group.group_id, [sample.num_tokens for sample in group.samples]) for group in state.live] == [
        (0, [1]), (1, [3]),
    ]  # fmt: skip


def test_the_newest_recording_of_a_step_counts_and_steps_are_in_order(tmp_path: Path) -> None:
    state = read(
        tmp_path, *(admit(number) for number in range(3)), *(finished(number, [0]) for number in range(3)),
        shipped(1, 1), shipped(2, 2), shipped(3, 0), lineage("l1"), shipped(1, 1, "l1", is_replay=True),
    )  # fmt: skip
    assert state.batches == (record_of(1, "l1", 1), record_of(2, "l0", 2), record_of(3, "l0", 0))
    with Ledger(tmp_path) as ledger:
        assert ledger.batches_after(1) == state.batches[1:]


def test_checkpoints_survive_up_to_the_one_that_a_later_lineage_began_from(tmp_path: Path) -> None:
    assert read(
        tmp_path, checkpoint(1), checkpoint(2), checkpoint(3), lineage("l1", checkpoint=2), checkpoint(4, "l1"),
        lineage("l2", checkpoint=4), checkpoint(5, "l2"),
    ).checkpoints == (
        CheckpointRecord(version=1, lineage="l0", path="c1"), CheckpointRecord(version=2, lineage="l0", path="c2"),
        CheckpointRecord(version=4, lineage="l1", path="c4"), CheckpointRecord(version=5, lineage="l2", path="c5"),
    )  # fmt: skip


def test_each_version_that_was_evaluated_is_known_once_in_order(tmp_path: Path) -> None:
    assert read(tmp_path, evaluated(4), evaluated(0), evaluated(4), evaluated(2)).evals == (0, 2, 4)


def test_lives_of_the_run_are_all_lineages_but_those_of_a_restarted_trainer(tmp_path: Path) -> None:
    again = lineage("l2")
    again = msgspec.structs.replace(again, effect=msgspec.structs.replace(again.effect, trainer_died="killed"))
    state = read(tmp_path, lineage("l1"), again)
    assert (state.num_lineages, state.num_trainer_restarts, state.num_lives) == (3, 1, 2)


def test_groups_of_a_batch_are_read_as_they_were_written_and_damage_is_no_batch() -> None:
    groups = tuple(
        BatchGroup(group_id=number, sample_indices=(0, 2, number), first_version=number - 1) for number in range(3)
    )
    assert decode_groups(encode_groups(groups)) == groups
    with pytest.raises(ValueError, match=r"truncated|Expected"):
        decode_groups(encode_groups(groups)[:-1])
