"""A coordinator with short names for events, for tests that tell a scenario."""

from __future__ import annotations

from typing import Any, TypeVar

from areal_like.wire.messages import ReturnReason
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import Effect, LeaseOrder, SendAck, SendCancel, SendLeases
from controller.coordinator.events import (
    BatchRequested,
    Event,
    LeaseReturned,
    PartialReport,
    ProgressReported,
    Published,
    RunStarted,
    SampleReported,
    Tick,
    VersionRewritten,
    WorkerJoined,
    WorkerLost,
    WorkerVersionFailed,
    WorkerVersionLoaded,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchGroup, BatchRecord, LedgerState, SampleRecord

E = TypeVar("E", bound=Effect)


class Desk:
    """A coordinator with short names for events; keeps every effect and who holds which lease."""

    def __init__(self, coordinator: Coordinator | None = None, **settings: Any) -> None:
        chosen = {"groups_per_step": 2, "group_size": 1, "num_steps": 9, **settings}
        self.coordinator = coordinator or Coordinator(CoordinatorSettings(**chosen))
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.held: dict[int, tuple[str, LeaseOrder]] = {}

    def do(self, event: Event) -> list[Effect]:
        before = self.coordinator.progress
        effects = self.coordinator.handle(event, self.now_s)
        assert self.coordinator.progress >= before, "progress only rises: steps back would hide a step ahead"
        self.effects += effects
        for effect in effects:
            if isinstance(effect, SendLeases):
                self.held |= {order.lease_id: (effect.worker, order) for order in effect.leases}
            elif isinstance(effect, SendCancel | SendAck):
                for lease_id in effect.lease_ids:
                    self.held.pop(lease_id, None)
        assert self.coordinator.counts().add_up()
        return effects

    def start(self, *, workers: tuple[str, ...] = ("w0",), capacity: int = 64, checkpoint: int = 0) -> list[Effect]:
        life = "l1" if self.coordinator.shipped or checkpoint else "l0"
        self.lineage = life
        effects = self.do(RunStarted(lineage=life, checkpoint_version=checkpoint))
        for worker in workers:
            effects += self.join(worker, capacity=capacity)
        effects += self.publish(checkpoint)
        for worker in workers:
            effects += self.load(worker, checkpoint)
        return effects

    def join(self, worker: str, incarnation: str = "a", capacity: int = 64) -> list[Effect]:
        return self.do(WorkerJoined(worker=worker, incarnation=incarnation, capacity=capacity))

    def lose(self, worker: str, *, is_permanent: bool = False) -> list[Effect]:
        for lease_id in [i for i, (holder, _) in self.held.items() if holder == worker]:
            del self.held[lease_id]
        return self.do(WorkerLost(worker=worker, reason="killed", is_permanent=is_permanent))

    def publish(self, version: int) -> list[Effect]:
        return self.do(Published(version=version, lineage=self.lineage, manifest_path=f"v{version}"))

    def load(self, worker: str, version: int) -> list[Effect]:
        return self.do(WorkerVersionLoaded(worker=worker, version=version, lineage=self.lineage))

    def fail(self, worker: str, version: int) -> list[Effect]:
        return self.do(WorkerVersionFailed(worker=worker, version=version, lineage=self.lineage, reason="bad checksum"))

    def damaged(self, worker: str, version: int) -> list[Effect]:
        return self.do(
            WorkerVersionFailed(
                worker=worker, version=version, lineage=self.lineage, reason="bad checksum", is_damaged=True
            )
        )

    def rewritten(self, version: int, reason: str = "") -> list[Effect]:
        path = "" if reason else f"again{version}"
        return self.do(VersionRewritten(version=version, lineage=self.lineage, manifest_path=path, reason=reason))

    def ask(self, step: int) -> list[Effect]:
        return self.do(BatchRequested(step=step))

    def tick(self, seconds: float) -> list[Effect]:
        self.now_s += seconds
        return self.do(Tick())

    def lease_of(self, group_id: int, sample_index: int = 0, purpose: str = "train") -> int:
        """The running lease of this sample."""
        (lease_id,) = [
            lease_id
            for lease_id, (_, order) in self.held.items()
            if (order.group_id, order.sample_index, order.purpose) == (group_id, sample_index, purpose)
        ]
        return lease_id

    def report(
        self,
        lease_id: int,
        *,
        group_id: int,
        sample_index: int = 0,
        worker: str = "w0",
        first: int = 0,
        last: int | None = None,
        kind: Any = "scored",
        value: float | None = 1.0,
        failed_in: str = "",
        reason: str = "",
    ) -> list[Effect]:
        return self.do(
            SampleReported(
                worker=worker,
                outcome=SampleOutcome(
                    lease_id=lease_id,
                    group_id=group_id,
                    sample_index=sample_index,
                    num_tokens=5,
                    first_version=first,
                    last_version=first if last is None else last,
                    verdict_kind=kind,
                    value=value if kind == "scored" else None,
                    failed_in=failed_in,
                    reason=reason,
                ),
            )
        )

    def finish(self, group_id: int, sample_index: int = 0, purpose: str = "train", **facts: Any) -> list[Effect]:
        lease_id = self.lease_of(group_id, sample_index, purpose)
        facts.setdefault("worker", self.held[lease_id][0])
        return self.report(lease_id, group_id=group_id, sample_index=sample_index, **facts)

    def progress(self, lease_id: int, start: int, versions: list[int], worker: str = "w0") -> list[Effect]:
        return self.do(ProgressReported(worker=worker, items=(part(lease_id, start, versions),)))

    def give_back(
        self, lease_id: int, start: int, versions: list[int], reason: ReturnReason, detail: str = ""
    ) -> list[Effect]:
        worker, _ = self.held.pop(lease_id)
        return self.do(LeaseReturned(worker=worker, part=part(lease_id, start, versions), reason=reason, detail=detail))


def part(lease_id: int, start: int, versions: list[int]) -> PartialReport:
    first, last = (versions[0], versions[-1]) if versions else (-1, -1)
    return PartialReport(
        lease_id=lease_id, start=start, num_tokens=len(versions), first_version=first, last_version=last
    )


def only(effects: list[Effect], kind: type[E]) -> E:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def has(effects: list[Effect], kind: type[Effect]) -> bool:
    return any(isinstance(effect, kind) for effect in effects)


def leased(effects: list[Effect]) -> list[LeaseOrder]:
    return [order for effect in effects if isinstance(effect, SendLeases) for order in effect.leases]


def state_of(**facts: Any) -> LedgerState:
    empty: dict[str, Any] = {
        "num_lineages": 1, "num_drawn": 0, "num_filtered": 0, "dropped": {}, "live": (), "batches": (),
        "checkpoints": (), "evals": (),
    }  # fmt: skip
    return LedgerState(**{**empty, **facts})


def batch_of(step: int, *group_ids: int) -> BatchRecord:
    groups = tuple(BatchGroup(group_id=i, sample_indices=(0,), first_version=0) for i in group_ids)
    return BatchRecord(step=step, lineage="l0", groups=groups)


def sample(index: int, first: int, last: int, num_tokens: int = 4, **facts: Any) -> SampleRecord:
    return SampleRecord(sample_index=index, num_tokens=num_tokens, first_version=first, last_version=last, **facts)
