"""Random schedules in which weight versions are delayed, fail, are damaged or lost on their way to workers.

`VersionCluster` checks the invariants of each worker's version after every event. The transition table is in
controller/coordinator/worker_version.py, the checks of a run are in virtual_cluster.py.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from roster_oracle import kept, looked_up
from schedules import random_settings
from virtual_cluster import VirtualCluster, VirtualWorker

from controller.coordinator import rewriting
from controller.coordinator.effects import Effect, Note, SendLeases, SendVersion
from controller.coordinator.events import Event, WorkerJoined, WorkerLost, WorkerVersionLoaded, WorkerVersionStaged
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Worker
from controller.coordinator.worker_version import VersionState, WorkerVersion

STEADY = (
    "deliver", "deliver", "deliver", "deliver", "generate", "generate", "load_version", "load_version", "request_batch",
    "finish_step", "report_progress", "tick", "restart_worker", "come_back", "start_trainer", "write_again",
    "tell_speed", "leave", "answer_recalls",
)  # fmt: skip
FAULTS = (
    "fail_to_load", "damage_version", "lose_announcement", "silence", "kill_worker", "drain_worker", "kill_trainer",
    "wait_long", "stage_again", "stage_again", "hang",
)  # fmt: skip
EXPECTED = (VersionState.LOADING, VersionState.SWAPPING, VersionState.RETRYING, VersionState.RETRY_SWAPPING)
QUARANTINED = (
    VersionState.QUARANTINED, VersionState.RETRYING, VersionState.RETRY_STAGED, VersionState.RETRY_SWAPPING,
)  # fmt: skip


def check_version(weights: WorkerVersion) -> None:
    """What must hold of a worker's version in every state."""
    assert (weights.load_due_s < float("inf")) == (weights.state in EXPECTED), f"deadline in {weights.state}"
    assert bool(weights.quarantine) == (weights.state in QUARANTINED), f"quarantine in {weights.state}"
    assert weights.is_staged == (weights.state in (VersionState.STAGED, VersionState.RETRY_STAGED))
    assert weights.has_turn == (weights.state in (VersionState.SWAPPING, VersionState.RETRY_SWAPPING))
    assert weights.version <= weights.announced, "a version that was never announced"
    if weights.is_staged or weights.has_turn:
        assert weights.announced >= 0, "staged without an announcement"


class VersionCluster(VirtualCluster):
    """One run, with the checks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.barred: set[str] = set()
        """Workers that get no leases until they have loaded a version."""
        self.hung: set[tuple[str, int]] = set()
        """Processes, by name and incarnation, that never load another version."""
        super().__init__(*args, **options)

    def handle_burst(self, burst: list[tuple[Event, dict[int, list[int]]]], **options: bool) -> None:
        """One event at a time, so that effects are checked in the order of the events that they answer."""
        for one in burst:
            unstaged = self._not_to_be_staged_by(one[0])
            super().handle_burst([one], **options)
            if self.end is None:
                self._check_versions()
                assert unstaged is None or not unstaged.is_staged, "staged another version than was announced"

    def _not_to_be_staged_by(self, event: Event) -> WorkerVersion | None:
        """The version of the worker that says it has staged another one than was announced to it."""
        worker = self.coordinator._state.workers.get(getattr(event, "worker", ""))
        if worker is None or worker.weights.is_staged or not isinstance(event, WorkerVersionStaged):
            return None
        return worker.weights if event.version != worker.weights.announced else None

    def _watch(self, event: Event) -> None:
        super()._watch(event)
        if isinstance(event, WorkerVersionLoaded | WorkerJoined):
            self.barred.discard(event.worker)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Note) and effect.kind == "quarantined":
            self.barred.add(effect.text.split()[0])
        if isinstance(effect, SendVersion):
            weights = self.coordinator._state.workers[effect.worker].weights
            assert weights.load_due_s < float("inf"), "a version was announced without a deadline"
        if isinstance(effect, SendLeases):
            assert effect.worker not in self.barred, "atomic-versions: a quarantined worker is leased to"
        super()._carry_out(effect)

    def restart(self, load: Any = None) -> None:
        self.barred.clear()
        super().restart(load)

    def _check_versions(self) -> None:
        state = self.coordinator._state
        for worker in state.workers.values():
            check_version(worker.weights)
            assert worker.weights.pin is None or worker.is_working, "an evaluation waits for a worker that is away"
            assert not self._is_forgotten(worker), f"{worker.name} is behind, and nothing is expected of it"
        assert kept(state.workers) == looked_up(state.workers), "the lists of workers are out of date"

    def _is_forgotten(self, worker: Worker) -> bool:
        trainer, weights = self.coordinator._state.trainer, worker.weights
        is_available = bool(trainer.manifest_path) and not rewriting.is_under_way(trainer, trainer.version)
        is_behind = weights.state is VersionState.IDLE and weights.version < weights.announced
        is_behind &= not weights.must_announce_again
        return worker.is_present and not worker.is_draining and is_behind and is_available

    # ------------------------------------------------------------ faults

    def lose_announcement(self) -> None:
        """What was sent last is lost with the connection; the worker says Hello again later."""
        worker = self._alive()
        if worker is not None and worker.is_known and not worker.is_leaving:
            worker.is_known = False
            if worker.announced > worker.version and not worker.has_staged:
                worker.announced = worker.version
            self.handle(WorkerLost(worker=worker.name, reason="unreachable", may_live=True))

    def stage_again(self) -> None:
        """The same message once more: it was sent again after the connection was made again."""
        worker = self._alive()
        if worker is not None and worker.has_staged and worker.announced >= 0:
            self.post(
                worker.name, WorkerVersionStaged(worker=worker.name, version=worker.announced, lineage=worker.lineage)
            )

    def hang(self) -> None:
        """A worker never loads another version, and goes on with its samples: often one that holds older groups.

        Another worker stays fit for new ones.
        """
        present = [worker for worker in self.workers.values() if self._stays(worker)]
        alive = [worker for worker in present if worker.is_alive]
        if alive and len(present) > 1 and not self._is_any_hung() and self.settings.load_deadline_s < 100.0:
            worker = self.rng.choice([worker for worker in alive if worker.tasks] or alive)
            self.hung.add((worker.name, worker.incarnation))

    def _stays(self, worker: VirtualWorker) -> bool:
        return not worker.is_leaving and not worker.is_away and worker.name not in self.leaving

    def _is_any_hung(self) -> bool:
        return any((worker.name, worker.incarnation) in self.hung for worker in self.workers.values())

    def drain_worker(self) -> None:
        """Not while a worker hangs: it might be the last one."""
        if not self._is_any_hung():
            super().drain_worker()

    def _load(self, worker: VirtualWorker) -> None:
        if (worker.name, worker.incarnation) not in self.hung:
            super()._load(worker)

    def wait_long(self) -> None:
        """A deadline of a load passes."""
        self.now_s += 5.0
        self.tick()


def run_versions(seed: int, **changes: Any) -> VersionCluster:
    """One seeded random schedule with faults, then calm until the end. Raises AssertionError on a violation."""
    rng = random.Random(seed)
    num_workers = rng.choice([1, 2, 3, 4])
    cluster = VersionCluster(
        version_settings(rng, num_workers, **changes), rng, num_workers=num_workers, capacity=rng.choice([1, 2, 4]),
        failure_rate=0.0,
    )  # fmt: skip
    weights = [1.0] * len(STEADY) + [rng.choice([0.05, 0.2, 0.5]) for _ in FAULTS]
    for action in rng.choices((*STEADY, *FAULTS), weights, k=400):
        if cluster.end is not None:
            break
        getattr(cluster, action)()
    cluster.run_to_end()
    cluster.check_end()
    return cluster


def version_settings(rng: random.Random, num_workers: int, **changes: Any) -> CoordinatorSettings:
    """Tiny runs with deadlines that pass or never pass, and enough attempts to recover."""
    chosen: dict[str, Any] = {
        "num_workers": num_workers, "num_steps": rng.randint(4, 12), "mode": "async",
        "max_staleness": rng.choice([1, 2, 4]), "swap": rng.choice(["rolling", "rolling", "rolling", "together"]),
        "load_deadline_s": rng.choice([4.0, 1e6]), "max_load_attempts": 1000, "group_timeout_s": 1e6,
        "max_sample_losses": 100, "num_eval_rows": rng.choice([0, 0, 2]), "eval_every_steps": rng.choice([0, 1]),
    }  # fmt: skip
    return msgspec.structs.replace(random_settings(rng), **{**chosen, **changes})
