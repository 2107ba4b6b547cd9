"""Current waits as sentences, for the watchdog and the live display (`owned-waits`)."""

from __future__ import annotations

from areal_like import staleness
from controller.coordinator import batch_selection, colocation, rewriting, usable_workers
from controller.coordinator.admission import may_start_group
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.worker import Worker


def waits(state: RunState) -> list[str]:
    """Current waits as sentences, most important first; empty if nothing waits."""
    trainer = state.trainer
    lines: list[str] = []
    if state.phase is Phase.OVER:
        return lines
    if trainer.version < 0:
        lines.append("all processes wait for the trainer to publish its starting version")
    elif trainer.trained < trainer.base:
        lines.append(f"the trainer restarts from version {trainer.base}")
    elif trainer.trained < trainer.version:
        lines.append(f"the trainer replays step {trainer.trained + 1} of {trainer.replay_until}")
    if state.phase is Phase.FINISHING:
        lines.extend(_ending(state))
    elif trainer.requested is not None:
        lines.append(_batch_wait(state))
    lines.extend(colocation.waits(state))
    lines.extend(rewriting.waits(trainer))
    for worker in state.workers.values():
        if line := _worker_wait(state, worker):
            lines.append(line)
    missing = usable_workers.num_expected(state)
    if missing > 0:
        lines.append(f"controller waits for {missing} rollout worker(s) to register")
    for job in state.evaluations.jobs:
        where = ", ".join(sorted(job.workers)) or "no worker yet"
        lines.append(
            f"{job.kind} evaluation of version {job.version}: {len(job.values)} of {job.num_rows} rows done, on {where}"
        )
    return lines


def _ending(state: RunState) -> list[str]:
    trainer, ending = state.trainer, state.ending
    if trainer.trained < ending.last_step:
        step = max(trainer.trained, trainer.base) + 1
        return [f"the run ends ({ending.reason}): waits for the trainer to finish step {step}"]
    if ending.last_step > trainer.base and not any(version >= ending.last_step for version in trainer.checkpoints):
        return [f"the run ends ({ending.reason}): waits for the trainer's checkpoint of version {ending.last_step}"]
    return []


def _batch_wait(state: RunState) -> str:
    table, count = state.groups.table, state.settings.groups_per_step
    line = f"trainer waits for batch {state.trainer.requested}: {table.num_ready} of {count} groups ready"
    if table.num_ready >= count and colocation.needs_engines_for_evaluation(state):
        line += ", but an evaluation needs the engines first"
    elif table.num_ready >= count and batch_selection.choose_batch(state) is None:
        assert state.settings.bound is not None, "without a bound nothing has a deadline"
        limit = state.trainer.next_step
        late = [
            group.group_id
            for group in table.live.values()
            if not group.is_ready and staleness.deadline(group.floor, state.settings.bound) <= limit + 1
        ]
        line += f", but unfinished groups must not pass their deadline (soonest: {late[:5] or 'later ones'})"
    held = [f"{w.name} holds {len(w.outstanding)} samples" for w in state.workers.values() if w.outstanding]
    if held:
        line += "; " + ", ".join(held)
    elif table.num_running:
        line += f"; samples of {table.num_running} groups wait for an eligible worker"
    return line


def _worker_wait(state: RunState, worker: Worker) -> str:
    if worker.is_draining:
        held = f" and hands back {len(worker.outstanding)} samples" if worker.outstanding else ""
        return f"{worker.name} leaves{held}" if worker.is_present else ""
    if worker.is_gone:
        return f"{worker.name} is lost and not restarted"
    if not worker.is_present:
        return f"{worker.name} is lost; its restart is awaited"
    weights = worker.weights
    if weights.quarantine:
        return f"{worker.name} is quarantined, it could not load version {weights.announced}: {weights.quarantine}"
    if weights.is_staged and weights.announced > weights.version:
        return f"{worker.name} has staged version {weights.announced} and waits for permission to load it"
    if weights.version < weights.announced and not worker.outstanding:
        return f"{worker.name} loads version {weights.announced}"
    is_idle = state.phase is Phase.RUNNING and worker.is_usable and not worker.outstanding
    if is_idle and not may_start_group(state.settings, state.groups, weights.version):
        return (
            f"{worker.name} is idle at version {weights.version}: {state.groups.num_started} groups started, "
            f"more only after the next version"
        )
    return ""
