"""Who gets which sample next: evaluations, samples that wait, then new groups, as far as credits go.

Owns: the hand-out of leases within workers' credits. Refuses: whether a group may start (admission.py).

Samples of one group go to one worker where it has room. Among workers the one with most free credits is served first,
and none starts more than its share of what the bound lets run at once, so that the first to load a version does not
take the whole step while the others still load it.
A sample goes only to a worker that has loaded at least its min_version, so that no slot waits for weights. While
training work may exist, evaluations get at most half of a worker's credits, then whatever is left over.
"""

from __future__ import annotations

import math

from areal_like.trajectory import NO_VERSION
from controller import eval_pins
from controller import protocol as p
from controller.admission import may_start_group
from controller.groups import Group, Sample
from controller.state import Phase, RunState, Worker


def assign(state: RunState) -> None:
    """Lease everything that can be leased now; one message per worker."""
    if state.phase is Phase.OVER or not _has_work(state):
        return
    workers = [worker for worker in state.workers.values() if worker.is_usable and worker.free > 0]
    if not workers:
        return
    orders: dict[str, list[p.LeaseOrder]] = {}
    is_training = state.phase is Phase.RUNNING
    if state.eval_jobs:
        _lease_eval_rows(state, workers, orders, share=2 if is_training else 1)
    if is_training:
        _lease_pending(state, workers, orders)
        share = _samples_per_credit(state)
        while (worker := _worker_for_group(state, workers, share)) is not None:
            _start_group(state, worker, orders)
            _lease_pending(state, workers, orders)
    if state.eval_jobs:
        _lease_eval_rows(state, workers, orders, share=1)
    for name, leases in orders.items():
        state.emit(p.SendLeases(worker=name, leases=tuple(leases)))


def _has_work(state: RunState) -> bool:
    return bool(state.eval_jobs) or state.table.has_pending or may_start_group(state, state.version)


def _lease_eval_rows(state: RunState, workers: list[Worker], orders: dict[str, list[p.LeaseOrder]], share: int) -> None:
    for worker in workers:
        job = worker.pin
        if job is None or worker.version != job.version:
            continue
        while worker.free > 0 and job.held[worker.name] < max(1, worker.capacity // share):
            lease = eval_pins.lease_row(state, worker)
            if lease is None:
                break
            order = p.LeaseOrder(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                sample_index=0,
                purpose="eval",
                min_version=job.version,
                prefix_tokens=0,
            )
            orders.setdefault(worker.name, []).append(order)


def _lease_pending(state: RunState, workers: list[Worker], orders: dict[str, list[p.LeaseOrder]]) -> None:
    """Samples of groups that already started, earliest deadline first."""
    blocked: list[tuple[Group, Sample]] = []
    last: tuple[int, Worker] | None = None
    while any(worker.free > 0 for worker in workers):
        found = state.table.pop_pending()
        if found is None:
            break
        group, sample = found
        able = [w for w in workers if w.free > 0 and w.version >= group.min_version(sample)]
        if not able:
            blocked.append(found)
            continue
        if last is not None and last[0] == group.group_id and last[1] in able:
            worker = last[1]
        else:
            worker = max(able, key=lambda w: w.free)
        last = (group.group_id, worker)
        _lease_sample(state, worker, group, sample, orders)
    for group, sample in blocked:
        state.table.push_pending(group, sample)


def _samples_per_credit(state: RunState) -> float:
    """Of the samples that the bound lets run at once, how many fall to each credit of the workers there are."""
    settings = state.settings
    if settings.bound is None:
        return math.inf
    num_credits = sum(
        worker.capacity for worker in state.workers.values() if worker.is_present and not worker.quarantine
    )
    return settings.groups_per_step * (settings.bound + 1) * settings.group_size / max(1, num_credits)


def _worker_for_group(state: RunState, workers: list[Worker], share: float) -> Worker | None:
    """The roomiest worker that may start a whole group, or part of one where it could never hold two."""
    size = state.settings.group_size
    for worker in sorted(workers, key=lambda w: -w.free):
        is_roomy = worker.free >= size or (worker.free > 0 and worker.capacity < 2 * size)
        is_fair = not worker.outstanding or len(worker.outstanding) < share * worker.capacity
        if is_roomy and is_fair and may_start_group(state, worker.version):
            return worker
    return None


def _start_group(state: RunState, worker: Worker, orders: dict[str, list[p.LeaseOrder]]) -> None:
    group = state.table.add(state.num_drawn, worker.version)
    state.num_drawn += 1
    state.emit(p.RecordGroup(group_id=group.group_id, version=worker.version, started=state.num_started))
    for sample in group.samples:
        if worker.free > 0:
            _lease_sample(state, worker, group, sample, orders)
        else:
            state.table.push_pending(group, sample)


def _lease_sample(
    state: RunState, worker: Worker, group: Group, sample: Sample, orders: dict[str, list[p.LeaseOrder]]
) -> None:
    min_version = group.min_version(sample)
    assert sample.lease_id is None
    assert worker.version >= min_version > NO_VERSION
    lease = state.new_lease(worker, "train", group.group_id, sample.index, min_version)
    sample.lease_id = lease.lease_id
    group.lease_ids.add(lease.lease_id)
    if group.leased_at_s is None:
        state.table.start_timer(group, state.now_s, state.settings.group_timeout_s)
    order = p.LeaseOrder(
        lease_id=lease.lease_id,
        group_id=group.group_id,
        sample_index=sample.index,
        purpose="train",
        min_version=min_version,
        prefix_tokens=sample.num_tokens,
    )
    orders.setdefault(worker.name, []).append(order)
