"""Hands out leases within workers' credits: first evaluations, then waiting samples, then new groups.

Whether a group may start is decided in admission.py, the worker in routing.py.

A sample is only leased to a worker that has loaded at least its min_version, so that no slot waits for weights. While
training work may exist, evaluations get at most half of a worker's credits, and in addition the credits that are left
over.
"""

from __future__ import annotations

from areal_like.trajectory import NO_VERSION
from controller.coordinator import colocation, evaluation
from controller.coordinator.admission import may_start_group
from controller.coordinator.effects import LeaseOrder, RecordGroup, RecordSkips, SendLeases
from controller.coordinator.groups import Group, Sample
from controller.coordinator.routing import Router
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.worker import Worker


def assign(state: RunState) -> None:
    """Make all leases that are possible now; one message per worker."""
    if state.phase is Phase.OVER or not colocation.is_engines_time(state) or not _has_work(state):
        return
    router = Router(state)
    orders: dict[str, list[LeaseOrder]] = {}
    is_training = state.phase is Phase.RUNNING
    if state.evaluations.jobs:
        _lease_eval_rows(state, router.workers, orders, share=2 if is_training else 1)
    if is_training:
        # Samples of started groups are first: their deadlines are earlier, and only complete groups are useful.
        _lease_pending(state, router, orders)
        while (worker := router.for_group()) is not None:
            _start_group(state, router, worker, orders)
    if state.evaluations.jobs:
        _lease_eval_rows(state, router.workers, orders, share=1)
    for name, leases in orders.items():
        state.emit(SendLeases(worker=name, leases=tuple(leases)))


def _has_work(state: RunState) -> bool:
    is_waiting = bool(state.evaluations.jobs) or state.groups.table.has_pending
    return is_waiting or may_start_group(state.settings, state.groups, state.trainer.version)


def _lease_eval_rows(state: RunState, workers: list[Worker], orders: dict[str, list[LeaseOrder]], share: int) -> None:
    for worker in workers:
        job = worker.weights.pin
        if job is None or worker.weights.version != job.version:
            continue
        while worker.free > 0 and job.held[worker.name] < max(1, worker.capacity // share):
            lease = evaluation.lease_row(state, worker)
            if lease is None:
                break
            order = LeaseOrder(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                sample_index=0,
                purpose="eval",
                min_version=job.version,
                prefix_tokens=0,
            )
            orders.setdefault(worker.name, []).append(order)


def _lease_pending(state: RunState, router: Router, orders: dict[str, list[LeaseOrder]]) -> None:
    """Samples of groups that already started, earliest deadline first."""
    blocked: list[tuple[Group, Sample]] = []
    while not router.is_full:
        found = state.groups.table.pop_pending()
        if found is None:
            break
        group, sample = found
        worker = router.for_sample(group, sample)
        if worker is None:
            blocked.append(found)
        else:
            _lease_sample(state, worker, group, sample, orders)
    for group, sample in blocked:
        state.groups.table.push_pending(group, sample)


def _start_group(state: RunState, router: Router, worker: Worker, orders: dict[str, list[LeaseOrder]]) -> None:
    """Start a group; the worker becomes its preferred worker. Samples that do not fit anywhere wait."""
    groups = state.groups
    taken = groups.draws.take()
    group = groups.table.add(groups.num_drawn, worker.weights.version)
    group.home, group.draw = worker.name, taken.draw
    groups.num_drawn += 1
    if taken.skipped:
        state.emit(RecordSkips(draws=taken.skipped))
    state.emit(
        RecordGroup(
            group_id=group.group_id, version=worker.weights.version, started=groups.num_started, draw=taken.draw
        )
    )
    for sample in group.samples:
        taker = worker if sample.index == 0 else router.for_sample(group, sample)
        if taker is None:
            groups.table.push_pending(group, sample)
        else:
            _lease_sample(state, taker, group, sample, orders)


def _lease_sample(
    state: RunState, worker: Worker, group: Group, sample: Sample, orders: dict[str, list[LeaseOrder]]
) -> None:
    min_version = group.min_version(sample)
    assert sample.lease_id is None
    assert worker.weights.version >= min_version > NO_VERSION
    lease = state.new_lease(worker, "train", group.group_id, sample.index, min_version, sample.num_tokens)
    sample.lease_id = lease.lease_id
    group.lease_ids.add(lease.lease_id)
    if group.leased_at_s is None:
        state.groups.table.start_timer(group, state.now_s, state.settings.group_timeout_s)
    order = LeaseOrder(
        lease_id=lease.lease_id,
        group_id=group.group_id,
        sample_index=sample.index,
        purpose="train",
        min_version=min_version,
        prefix_tokens=sample.num_tokens,
        draw=group.draw,
        moved_from=_arrival(state, worker, group, sample),
    )
    orders.setdefault(worker.name, []).append(order)


def _arrival(state: RunState, worker: Worker, group: Group, sample: Sample) -> str:
    """The worker that returned the sample gracefully, if another one continues it; empty otherwise."""
    origin, is_migration = sample.moved_from, bool(sample.moving_to)
    sample.moved_from = sample.moving_to = ""
    if not origin or origin == worker.name:
        return ""
    if group.home not in state.workers or not state.workers[group.home].is_usable:
        group.home = worker.name
    sample.num_moves += is_migration
    what = f"group {group.group_id} sample {sample.index}"
    state.note("migrated", f"{what} moves from {origin} to {worker.name} with {sample.num_tokens} tokens")
    return origin
