"""Answers the trainer's request for a batch: with a new one, or with a recorded one.

The groups are selected in batch_selection.py and replay_buffer.py.
"""

from __future__ import annotations

from controller.coordinator import batch_selection, colocation
from controller.coordinator.effects import RecordBatch, SendBatch
from controller.coordinator.groups import Group
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.snapshot import BatchGroup, BatchRecord


def serve_trainer(state: RunState) -> bool:
    """Answer the trainer's request if possible; return whether a new batch was formed."""
    trainer, step = state.trainer, state.trainer.requested
    if step is None or (state.phase is Phase.FINISHING and step > state.ending.last_step):
        return False
    if not colocation.may_hand_over(state, step):
        return False
    if step <= trainer.shipped:
        _send_recorded(state, step)
        return False
    if step > trainer.next_step:
        state.note("ignored", f"batch {step} was requested before batch {trainer.next_step}")
        trainer.requested = None
        return False
    is_wanted = state.phase is Phase.RUNNING and step <= state.settings.num_steps
    chosen = batch_selection.choose_batch(state) if is_wanted else None
    if chosen is None:
        return False
    _ship(state, step, chosen)
    return True


def _ship(state: RunState, step: int, chosen: list[Group]) -> None:
    trainer = state.trainer
    groups = tuple(
        BatchGroup(
            group_id=group.group_id,
            sample_indices=tuple(sample.index for sample in group.samples if sample.is_kept),
            first_version=group.floor,
        )
        for group in chosen
    )
    for group in chosen:
        state.forget_group(group)
    # Counted in the same event in which the groups are removed: `bounded-admission` counts live and consumed groups
    # together.
    state.groups.num_consumed += len(groups)
    state.groups.num_vacant += state.settings.groups_per_step - len(groups)
    state.groups.num_failed = 0
    reused = state.groups.replay_buffer.choose(step)
    state.groups.replay_buffer.record(step, groups, reused)
    batch = BatchRecord(step=step, lineage=trainer.lineage, groups=groups, reused=reused)
    trainer.shipped, trainer.recorded[step] = step, batch
    state.progress += 1
    _record(state, batch, is_replay=False)
    _send(state, batch, is_replay=False)


def _send_recorded(state: RunState, step: int) -> None:
    """Send a recorded batch: in a replay after a resume (`exactly-once`), or again because the trainer repeats its
    request.
    """
    trainer = state.trainer
    batch = trainer.recorded.get(step)
    is_replay = step <= trainer.replay_until
    # A trainer that skipped a recorded step would train on batches in a different order than recorded.
    if batch is None or step > max(trainer.sent, trainer.base) + 1:
        state.note("ignored", f"batch {step} was requested out of order")
        trainer.requested = None
        return
    if is_replay and step not in trainer.replayed:
        trainer.replayed.add(step)
        state.progress += 1
        _record(state, batch, is_replay=True)
    _send(state, batch, is_replay=is_replay)


def _record(state: RunState, batch: BatchRecord, *, is_replay: bool) -> None:
    lineage = state.trainer.lineage
    state.emit(
        RecordBatch(step=batch.step, lineage=lineage, groups=batch.groups, reused=batch.reused, is_replay=is_replay)
    )


def _send(state: RunState, batch: BatchRecord, *, is_replay: bool) -> None:
    trainer = state.trainer
    trainer.requested = None
    trainer.sent = max(trainer.sent, batch.step)
    sent = SendBatch(
        step=batch.step, lineage=trainer.lineage, groups=batch.groups, reused=batch.reused, is_replay=is_replay
    )
    colocation.hand_over(state, sent)
