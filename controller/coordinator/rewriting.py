"""Rewrites of a published version whose files are damaged: the trainer writes it again completely, a bounded number of
times.

Decides when a rewrite is requested, which reports of damage it answers, and its deadline. Damage is detected by the
worker; files are written in trainer/weights/version_writer.py.

Only the newest version is rewritten: an older version is superseded by a newer one. A report refers to the files at the
time when the version was announced to that worker. A report that arrives after a rewrite finished is therefore answered
by the new files and requests no further one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from controller.coordinator import evaluation
from controller.coordinator.effects import SendRewrite
from controller.coordinator.events import Published, VersionRewritten
from controller.coordinator.run_parts import Rewrite, TrainerState

if TYPE_CHECKING:
    from controller.coordinator.run_state import RunState
    from controller.coordinator.worker import Worker

MAX_REWRITES = 3
"""Maximum rewrites of one version; afterwards it is handled like any other version that cannot be loaded."""
PATIENCE = 2.0
"""Deadline of a rewrite in multiples of the deadline of loading a version, without the time in which workers drain."""


def damage_reported(state: RunState, worker: Worker) -> bool:
    """Handle that the worker found the announced version damaged. Returns whether new files will be available."""
    trainer = state.trainer
    weights = worker.weights
    if weights.announced != trainer.version or weights.announced_lineage != trainer.version_lineage:
        return False
    if not trainer.manifest_path or not state.settings.num_steps:
        return False  # there is no trainer, or it replays and has not reached this version yet
    if not _is_of(trainer, trainer.version):
        trainer.rewrite = Rewrite(trainer.version, trainer.version_lineage)
    rewrite = trainer.rewrite
    assert rewrite is not None
    if rewrite.due_s < math.inf:
        return True  # already requested, because of another worker's report
    if weights.announced_writing < rewrite.count:
        # The report is about the files before the last rewrite; the present files may be intact.
        weights.offer_again()
        return True
    if rewrite.count >= MAX_REWRITES:
        return False
    rewrite.count += 1
    rewrite.num_unanswered += 1
    rewrite.due_s = state.now_s + PATIENCE * state.settings.idle_load_deadline_s
    state.emit(SendRewrite(version=rewrite.version, lineage=rewrite.lineage))
    state.note(
        "rewrite",
        f"{worker.name} found version {rewrite.version} damaged; the trainer writes it again "
        f"(attempt {rewrite.count} of {MAX_REWRITES})",
    )
    return True


def rewritten(state: RunState, event: VersionRewritten) -> None:
    """Handle that the trainer has rewritten the version, or reports why it has not.

    A late answer counts too: the new files may be in another location, and a delta that they replace is deleted.
    """
    trainer = state.trainer
    rewrite = trainer.rewrite
    is_expected = rewrite is not None and rewrite.num_unanswered > 0
    if not is_expected or not _is_of(trainer, event.version) or event.lineage != trainer.version_lineage:
        state.note("ignored", f"version {event.version} of lineage {event.lineage} was written again without a request")
        return
    assert rewrite is not None
    rewrite.due_s = math.inf
    rewrite.num_unanswered -= 1
    if event.reason:
        state.note("rewrite_failed", f"version {event.version} is not written again: {event.reason}")
        return
    state.progress += 1
    trainer.manifest_path = event.manifest_path
    published = Published(version=event.version, lineage=event.lineage, manifest_path=event.manifest_path)
    evaluation.published_again(state, published)
    for worker in state.workers.values():
        if worker.weights.quarantine and worker.weights.announced == event.version:
            worker.weights.offer_again()


def expire_loads(state: RunState) -> None:
    """Stop waiting for a trainer that does not answer: workers retry as usual."""
    rewrite = state.trainer.rewrite
    if rewrite is not None and state.now_s > rewrite.due_s:
        rewrite.due_s = math.inf
        limit_s = PATIENCE * state.settings.idle_load_deadline_s
        state.note("rewrite_failed", f"version {rewrite.version} was not written again within {limit_s:g} s")


def is_under_way(trainer: TrainerState, version: int) -> bool:
    """Return whether the trainer is rewriting this version, so that announcing it now would be useless."""
    return trainer.rewrite is not None and _is_of(trainer, version) and trainer.rewrite.due_s < math.inf


def writing_of(trainer: TrainerState, version: int) -> int:
    """Number of rewrites of this version."""
    return trainer.rewrite.count if trainer.rewrite is not None and _is_of(trainer, version) else 0


def waits(trainer: TrainerState) -> list[str]:
    """Waits for a rewrite, as sentences."""
    if not is_under_way(trainer, trainer.version):
        return []
    return [f"rollout workers wait for the trainer to write version {trainer.version} again, its files are damaged"]


def _is_of(trainer: TrainerState, version: int) -> bool:
    rewrite = trainer.rewrite
    return rewrite is not None and (rewrite.version, rewrite.lineage) == (version, trainer.version_lineage)
