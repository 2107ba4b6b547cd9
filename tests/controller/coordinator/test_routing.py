"""Claims about routing: who gets a group, when a group stays together, who gets nothing, and what credits count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from desk import Desk, leased
from made_workers import made_worker
from routing_view import BIG, view

from controller.coordinator.effects import Effect, SendLeases
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.events import RunStarted, WorkerSpeed
from controller.coordinator.groups import GroupTable
from controller.coordinator.worker import Worker


def measure(desk: Desk, **speeds: float) -> None:
    for worker, tokens_per_s in speeds.items():
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=tokens_per_s))


def homes(effects: list[Effect]) -> dict[int, set[str]]:
    """Workers by group."""
    found: dict[int, set[str]] = {}
    for effect in effects:
        if isinstance(effect, SendLeases):
            for order in effect.leases:
                found.setdefault(order.group_id, set()).add(effect.worker)
    return found


def held(desk: Desk) -> Counter[str]:
    return Counter(worker for worker, _ in desk.held.values())


def started(*, workers: tuple[str, ...] = ("w0", "w1"), capacity: int = 16, **changes: Any) -> Desk:
    desk = Desk(**{**BIG, **changes})
    desk.start(workers=workers, capacity=capacity)
    return desk


def test_samples_of_a_group_share_a_worker() -> None:
    desk = started()
    assert held(desk) == {"w0": 16, "w1": 16}
    assert all(len(workers) == 1 for workers in homes(desk.effects).values())


def test_first_worker_to_load_a_version_leaves_the_others_their_share_of_what_it_admits() -> None:
    names = ("w0", "w1", "w2", "w3")
    desk = started(workers=names, capacity=64, groups_per_step=8, num_steps=9, max_staleness=4)
    for lease_id, (_, order) in list(desk.held.items()):
        desk.finish(order.group_id, order.sample_index)
        assert lease_id not in desk.held
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    assert held(desk) == {"w0": 8}, "8 groups of 4 may start, for 4 workers"
    for worker in names[1:]:
        desk.load(worker, 1)
    assert held(desk) == dict.fromkeys(names, 8)


def test_round_robin_deals_samples_in_turn() -> None:
    busy, idle = Worker("busy", load_tokens=9000.0), Worker("idle")
    router = view(busy, idle, routing="round_robin")
    group = GroupTable(4).add(0, 0)
    dealt = [router.for_sample(group, sample) for sample in group.samples]
    assert [worker.name for worker in dealt if worker] == ["busy", "idle", "busy", "idle"]


def test_fast_worker_gets_more_where_work_is_scarce() -> None:
    desk = Desk(**{**BIG, "groups_per_step": 8, "num_steps": 9, "max_staleness": 1})
    desk.do(RunStarted(lineage="l0"))
    desk.lineage = "l0"
    for worker in ("slow", "fast"):
        desk.join(worker)
    measure(desk, slow=10.0, fast=70.0)
    desk.publish(0)
    for worker in ("slow", "fast"):
        desk.load(worker, 0)
    assert held(desk) == {"slow": 8, "fast": 56}, "64 samples, dealt by speed"


def test_new_group_goes_where_the_least_work_is_expected() -> None:
    chosen = view(Worker("a", load_tokens=900.0), Worker("b", load_tokens=300.0)).for_group()
    assert chosen is not None
    assert chosen.name == "b"


def test_work_is_weighed_by_measured_speed() -> None:
    """900 tokens at 100 a second are done before 300 at 10 a second."""
    fast, slow = Worker("fast", load_tokens=900.0, speed=100.0), Worker("slow", load_tokens=300.0, speed=10.0)
    assert view(slow, fast).for_group() is fast


def test_worker_not_measured_yet_counts_as_usual() -> None:
    router = view(Worker("a", speed=100.0), Worker("b", speed=50.0), Worker("new"))
    assert [router.speed(worker) for worker in router.workers] == [100.0, 50.0, 75.0]


def test_worker_behind_is_passed_over_even_when_it_idles() -> None:
    ahead, behind = made_worker("ahead", load_tokens=500.0, version=1), Worker("behind")
    assert view(behind, ahead).for_group() is ahead


def test_started_sample_is_passed_over_by_a_worker_behind_even_when_it_idles() -> None:
    ahead, behind = made_worker("ahead", load_tokens=500.0, version=1), Worker("behind")
    router, group = view(behind, ahead), GroupTable(4).add(0, 0)
    assert router.is_behind(behind)
    assert not router.is_behind(ahead)
    assert router.for_sample(group, group.samples[0]) is ahead
    group.home = group.samples[1].moving_to = "behind"
    assert router.for_sample(group, group.samples[1]) is ahead, "not even where it was to move, or its group lives"
    ahead.outstanding = set(range(16))
    full = view(behind, ahead)
    assert full.for_sample(group, group.samples[2]) is None, "it waits until one is free"


def test_worker_pinned_to_an_evaluation_is_behind_on_purpose() -> None:
    pinned = made_worker("pinned", pin=EvalJob(0, 0, "v0", "l0", "periodic", 1, [0]))
    assert view(made_worker("ahead", load_tokens=500.0, version=1), pinned).for_group() is pinned


def test_queue_of_a_slow_worker_is_short() -> None:
    """Credits beyond the slots count by speed: 8 slots each, and of 8 queue places the slow one gets 2."""
    desk = Desk(**BIG)
    desk.lineage = "l0"
    desk.do(RunStarted(lineage="l0"))
    for worker in ("slow", "fast"):
        desk.join(worker, capacity=16)
    measure(desk, slow=25.0, fast=100.0)
    desk.publish(0)
    for worker in ("slow", "fast"):
        desk.load(worker, 0)
    assert held(desk) == {"slow": 8, "fast": 16}, "10 places, and a group of 4 fits twice"


def test_worker_behind_gets_nothing_until_it_caught_up() -> None:
    desk = Desk(groups_per_step=1, group_size=1, num_steps=50, max_staleness=20)
    desk.start(workers=("w0", "w1"), capacity=4)
    for group_id in range(2):
        desk.finish(group_id)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    behind = [order.group_id for worker, order in desk.held.values() if worker == "w1"]
    assert behind
    for group_id in behind:
        assert "w1" not in {effect.worker for effect in desk.finish(group_id) if isinstance(effect, SendLeases)}
    assert "w1" in {effect.worker for effect in desk.load("w1", 1) if isinstance(effect, SendLeases)}


def test_lone_worker_takes_work_while_it_loads() -> None:
    desk = Desk(groups_per_step=1, group_size=1, num_steps=50, max_staleness=20)
    desk.start(capacity=4)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    assert leased(desk.finish(1)), "announced and not loaded: nobody is ahead of it"


def test_group_is_split_where_its_home_is_too_far_behind() -> None:
    """A returned sample moves from its worker if that is more than `affinity` groups' work behind the least loaded."""
    for affinity, wanted in ((0.0, "w1"), (50.0, "w0")):
        desk = Desk(**{**BIG, "groups_per_step": 4, "affinity": affinity, "migration": False})
        desk.start(workers=("w0", "w1"), capacity=16)
        for lease_id, (worker, order) in list(desk.held.items()):
            if worker == "w1":
                desk.report(lease_id, group_id=order.group_id, sample_index=order.sample_index, worker="w1")
                desk.held.pop(lease_id, None)
        lease_id = next(lease_id for lease_id, (worker, _) in desk.held.items() if worker == "w0")
        effects = desk.give_back(lease_id, 0, [0, 0], "segment")
        (sent,) = [effect for effect in effects if isinstance(effect, SendLeases)]
        assert sent.worker == wanted


def test_single_worker_gets_all_its_credits_whatever_its_speed() -> None:
    for speed in (0.0, 3.0, 1e6):
        desk = Desk(**BIG)
        desk.do(RunStarted(lineage="l0"))
        desk.lineage = "l0"
        desk.join("w0", capacity=16)
        measure(desk, w0=speed)
        desk.publish(0)
        desk.load("w0", 0)
        assert held(desk) == {"w0": 16}


@pytest.mark.parametrize("routing", ["least_tokens", "round_robin"])
def test_expected_work_of_an_empty_worker_is_nothing(routing: Any) -> None:
    desk = started(routing=routing, groups_per_step=2, num_steps=1)
    for _, order in list(desk.held.values()):
        desk.finish(order.group_id, order.sample_index)
    workers = desk.coordinator._state.workers.values()
    assert all(not worker.outstanding and worker.load_tokens == 0.0 for worker in workers)
