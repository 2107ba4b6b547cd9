"""Restores the coordinator's state in a new session of a run from the ledger.

Checks the settings that must agree with the record. The ledger is read in controller/ledger/schema.py; the effect of
the checkpoint that the run starts from is in coordinator.py.
"""

from __future__ import annotations

from areal_like.errors import UserError
from areal_like.trajectory import NO_VERSION
from controller.coordinator.draws import InOrder
from controller.coordinator.groups import GroupTable, Sample
from controller.coordinator.run_state import RunState
from controller.coordinator.snapshot import GroupRecord, LedgerState


def remember(state: RunState, ledger: LedgerState) -> None:
    """Fill the state of a new session from the ledger."""
    trainer, groups = state.trainer, state.groups
    settings = state.settings
    for batch in ledger.batches:
        if len(batch.groups) > settings.groups_per_step or (
            settings.max_attempts is None and len(batch.groups) != settings.groups_per_step
        ):
            raise _contradiction("groups_per_step", settings.groups_per_step, len(batch.groups))
        trainer.recorded[batch.step] = batch
        groups.replay_buffer.record(batch.step, batch.groups, batch.reused)
    groups.replay_buffer.keep_only(ledger.stored)
    trainer.shipped = len(ledger.batches)
    assert sorted(trainer.recorded) == list(range(1, trainer.shipped + 1)), "recorded batches have holes"
    trainer.num_lineages = ledger.num_lineages
    groups.num_drawn, groups.num_filtered = ledger.num_drawn, ledger.num_filtered
    groups.draws = InOrder(settings.max_draws, ledger.first_draw)
    groups.num_consumed = sum(len(batch.groups) for batch in ledger.batches)
    groups.num_vacant = trainer.shipped * settings.groups_per_step - groups.num_consumed
    groups.dropped.update(ledger.dropped)
    trainer.checkpoints = [checkpoint.version for checkpoint in ledger.checkpoints]
    state.evaluations.done = dict.fromkeys(ledger.evals, ())
    groups.has_kept = trainer.shipped > 0
    for record in ledger.live:
        _remember_group(groups.table, record, settings.group_size)


def _remember_group(table: GroupTable, record: GroupRecord, group_size: int) -> None:
    group = table.add(record.group_id, record.version)
    group.draw = record.group_id if record.draw is None else record.draw
    for known in record.samples:
        if known.sample_index >= group_size:
            raise _contradiction("group_size", group_size, known.sample_index + 1)
        group.samples[known.sample_index] = Sample(
            index=known.sample_index,
            num_tokens=known.num_tokens,
            first_version=known.first_version if known.num_tokens else NO_VERSION,
            last_version=known.last_version if known.num_tokens else NO_VERSION,
            is_finished=known.is_finished,
            is_kept=known.is_kept,
            value=known.value,
        )
    table.refresh(group)
    for sample in group.samples:
        if not sample.is_finished:
            table.push_pending(group, sample)
    if group.is_complete:
        table.mark_ready(group)


def _contradiction(key: str, wanted: int, found: int) -> UserError:
    return UserError(
        f"the run was recorded with {found}, but the config has {wanted}",
        where=key,
        remedy="resume with the run's own config.yaml",
    )
